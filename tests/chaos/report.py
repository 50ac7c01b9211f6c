"""The table of a run."""

from __future__ import annotations

from .quiet import longest_life, rss_growth
from .record import quantile
from .run import Outcome


def table(outcome: Outcome) -> str:
    """All figures, one a line."""
    record, plan = outcome.record, outcome.plan
    lines = [f"seed {plan.seed}, {outcome.took_s:.0f} s", "", "faults"]
    lines += [f"  {kind:<32}{count:>7}" for kind, count in record.faults.most_common()]
    lines += [f"  {'all':<32}{record.faults.total():>7}", "", "requests"]
    lines += [f"  {how:<32}{count:>7}" for how, count in record.ends.most_common()]
    lines += [f"  {'all':<32}{record.requests:>7}", f"  {'resumed, and finished':<32}{record.resumed:>7}", ""]
    lines.append("times                                 p50     p99     max       n")
    calm, crash = record.calm_gaps(), record.crash_gaps()
    for name, values in (
        ("death to `restarting`, ms", record.told_s),
        ("death to next token, ms", record.recovered_s),
        ("gap, before any fault, ms", calm),
        ("gap, another model just died, ms", crash),
    ):
        figures = [1000 * quantile(values, share) for share in (0.5, 0.99, 1.0)]
        lines.append(f"  {name:<32}" + "".join(f"{figure:>8.1f}" for figure in figures) + f"{len(values):>8}")
    lines += ["", "memory after warm-up, MiB           first    last     max  growth"]
    for server in outcome.servers:
        life = [sample.rss / 2**20 for sample in longest_life(server)]
        if life:
            figures = [life[0], life[-1], max(life), rss_growth(server) / 2**20]
            processes = f"{server.name} server ({len(server.lives)} processes)"
            lines.append(f"  {processes:<32}" + "".join(f"{figure:>8.1f}" for figure in figures))
    return "\n".join(lines)


def verdict(outcome: Outcome) -> str:
    """Violations with the evidence, or that there are none."""
    violations = outcome.record.violations
    if not violations:
        return "no violation"
    shown = "\n".join(f"  {line}" for line in violations[:40])
    return f"{len(violations)} violations with seed {outcome.plan.seed}:\n{shown}"
