"""The page of `megatron-credit inspect` for a large run: its size and how soon it is ready.

    python benchmarks/inspect_page.py [--rollouts 10000] [--tokens 256] [--opens 5] [--out FILE]

The run is made up of noise (tests/report/example_runs.py), with an advantage, the engine's log-prob
and three more numbers for each token. `open_s` is the time from navigation in headless Chromium to
a page that shows curves, table and the first rollouts; `search_s` the first search in all texts.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from megatron_credit.report.page.write import write_page

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from report.browser import Browser
from report.example_runs import write_large_run

SEARCH = """
document.getElementById("search").value = "no text has this";
document.getElementById("search").dispatchEvent(new Event("input"));
"""


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--opens", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_large_run(run, num_rollouts=arguments.rollouts, num_tokens=arguments.tokens)
        figures = measure(run, Path(folder) / "profile", opens=arguments.opens)
    figures |= {"date": str(date.today()), "machine": platform.machine()}
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def measure(run: Path, profile: Path, *, opens: int) -> dict[str, Any]:
    """Seconds and megabytes of one run's page."""
    start = time.perf_counter()
    page = write_page(run)
    written = time.perf_counter() - start
    with Browser(profile) as browser:
        browser.resize(1440, 900)
        seconds = [browser.open(page) for _ in range(opens)]
        rows = browser.run("document.querySelector('.table').ariaRowCount")
        start = time.perf_counter()
        browser.run(SEARCH)
        browser.until("document.getElementById('row-count').textContent.startsWith('0 of')")
        search = time.perf_counter() - start
    return {
        "rows": int(rows) - 1,
        "records_mb": sum(path.stat().st_size for path in run.glob("rollouts/*")) / 1e6,
        "page_mb": page.stat().st_size / 1e6,
        "write_s": written,
        "open_s_median": statistics.median(seconds),
        "open_s_worst": max(seconds),
        "search_s": search,
    }


if __name__ == "__main__":
    main()
