"""What drafts are worth that keep to the grammar of a structured output, beside those that do not."""
