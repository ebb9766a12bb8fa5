"""Two libraries that hold outputs to grammars, on the same schemas and the same texts."""
