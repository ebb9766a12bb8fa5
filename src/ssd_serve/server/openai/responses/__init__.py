"""`/v1/responses`: OpenAI's newer API, without anything kept between requests."""
