"""The server: OpenAI's HTTP interface and a page, over answers that are decoded together."""
