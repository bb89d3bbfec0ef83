"""What a train line of the journal says of the steps since the last one."""

import math


def train_values(results, peaks):
    """Values of a train line for the StepResults `results`; `peaks` are those of `peak_memory`."""
    peak_bytes, reserved_bytes, host_rss_bytes = peaks
    taken = [result for result in results if not result.skipped]
    seconds, tokens = sum(r.step_seconds for r in results), sum(r.tokens for r in results)
    last = results[-1]
    metrics = {name: _mean(taken, place, name) for place, name in enumerate(last.metrics)}
    return dict(
        step=last.step, epoch=last.epoch, **metrics, learn_rate=last.learn_rate, grad_norm=float(last.grad_norm),
        pairs_seen=last.pairs_seen, target_tokens=sum(r.weights[0] for r in taken), tokens=tokens,
        tokens_per_second=tokens / seconds,
        step_seconds=seconds / len(results), micro_batches=sum(r.micro_batches for r in results) / len(results),
        peak_bytes=peak_bytes, reserved_bytes=reserved_bytes, host_rss_bytes=host_rss_bytes,
        data_wait_seconds=sum(r.data_wait_seconds for r in results) / len(results),
    )  # fmt: skip


def _mean(results, place, name):
    """Mean of a metric over steps, NaN over none; `place` is its index among the objective's metrics."""
    weights = [result.weights[place] for result in results]
    total = sum(float(result.metrics[name]) * weight for result, weight in zip(results, weights, strict=True))
    return total / sum(weights) if results else math.nan
