"""The figures that /metrics shows, in the text form of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class ServerMetrics:
    """Counters of one server."""

    def __init__(self):
        registry = self._registry = CollectorRegistry()

        def named(kind, name, text, *labels, **more):
            return kind(f"chat_{name}", text, labels, registry=registry, **more)

        self.requests = named(Counter, "requests", "Requests answered.", "path", "status")
        self.prompt_tokens = named(Counter, "prompt_tokens", "Tokens of prompts.")
        self.new_tokens = named(Counter, "generated_tokens", "Tokens of answers.")
        self.first_token_seconds = named(
            Histogram, "first_token_seconds", "Seconds until an answer begins.", buckets=SECONDS
        )
        self.request_seconds = named(Histogram, "request_seconds", "Seconds until an answer ends.", buckets=SECONDS)
        self._open = named(Gauge, "open_requests", "Requests that are being answered or wait.")

    def text(self, num_open):
        """All figures; `num_open` requests are open now."""
        self._open.set(num_open)
        return generate_latest(self._registry)
