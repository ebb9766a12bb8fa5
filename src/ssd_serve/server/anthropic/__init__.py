"""Anthropic's API, `/v1/messages`: the same answers in other words."""
