"""What operators see of a server: figures, a line for each request, traces."""
