"""Who runs where: channels between processes, the local launcher, supervision."""
