"""The page of a run in a real browser, opened from a file."""

import json

import pytest
from report.browser import Browser, find_chromium
from report.example_runs import ATTACK, METRICS, write_example, write_large_run

from megatron_credit.report.page.write import write_page

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="no Chromium is installed (apt-get install chromium)"
)
TOKEN = "document.querySelectorAll('.pane')[{pane}].querySelectorAll('.token')[{at}]"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1440, 900)
        yield browser


@pytest.fixture(scope="module")
def example_page(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "example"
    write_example(run)
    return write_page(run)


@pytest.fixture
def page(browser, example_page):
    browser.prefer("light")
    browser.open(example_page)
    yield browser
    assert browser.errors == []
    assert browser.requests == [example_page.as_uri()]
    assert browser.run("window.attacked") is None


def colour(browser: Browser, pane: int, at: int) -> list[int]:
    """Red, green and blue behind a token; white where it has no colour."""
    found = browser.run(f"getComputedStyle({TOKEN.format(pane=pane, at=at)}).backgroundColor")
    numbers = [float(part) for part in found[found.index("(") + 1 : -1].split(",")]
    return [255, 255, 255] if numbers[3:] == [0] else [int(number) for number in numbers[:3]]


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements."""
    nodes = f"document.querySelectorAll({json.dumps(selector)})"
    return browser.run(f"[...{nodes}].map((node) => node.textContent)")


def choose(browser: Browser, selector: str, value: str) -> None:
    """Sets a field as a user would."""
    field = f"document.querySelector({json.dumps(selector)})"
    browser.run(
        f"({field}.value = {json.dumps(value)}, {field}.dispatchEvent(new Event('input')),"
        f" {field}.dispatchEvent(new Event('change')), null)"
    )


def opened(browser: Browser) -> dict[str, str]:
    """What the address says of the rollout that is shown."""
    return browser.run("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")


def test_curves_show_the_numbers_of_the_file(page):
    assert "0.51953125" not in texts(page, ".chart-legend .number")
    page.run("document.querySelector('[aria-label^=Accuracy]').focus()")
    page.press("ArrowLeft")
    assert "0.51953125" in texts(page, ".chart-legend .number")
    for name in ("grad_norm", "policy/entropy", "reward/mean", "mismatch/logprob_abs"):
        choose(page, "#metric", name)
        svg = f"document.querySelector('svg[aria-label^=\"{name}\"]')"
        page.run(f"{svg}.focus()")
        for step in sorted((line["step"] for line in METRICS if name in line), reverse=True):
            said = page.run(f"{svg}.getAttribute('aria-valuetext')").replace("\u2212", "-")
            found = float(said.split(" ")[-1])
            wanted = METRICS[step][name]
            assert found == wanted or (found != found and wanted != wanted)
            page.press("ArrowLeft")


def test_a_click_on_a_step_filters_the_table(page):
    page.run("document.querySelector('[aria-label^=Reward]').focus()")
    page.press("ArrowLeft")
    page.press("Enter")
    assert texts(page, "#row-count") == ["2 of 4 rollouts"]
    assert {row.split("sum/0")[0] for row in texts(page, ".rows .row")} == {"1sums"}


def test_filters(page):
    for selector, value, count in (
        ("[aria-label=Outcome]", "wrong", "1 of 4 rollouts"),
        ("[aria-label=Outcome]", "", "4 rollouts"),
        ("[aria-label=Groups]", "mixed", "2 of 4 rollouts"),
        ("[aria-label=Groups]", "flat", "2 of 4 rollouts"),
        ("[aria-label=Groups]", "all", "4 rollouts"),
        ("[aria-label=Source]", "sums", "2 of 4 rollouts"),
        ("#search", "2=4", "1 of 4 rollouts"),
        ("#search", "1 + 2 =", "2 of 4 rollouts"),
    ):
        choose(page, selector, value)
        page.until(f"document.getElementById('row-count').textContent === '{count}'", seconds=20)
    page.move(".filters .quiet", click=True)
    page.until("document.getElementById('row-count').textContent === '4 rollouts'", seconds=20)
    page.move("#truncated", click=True)
    page.until("document.getElementById('row-count').textContent === '2 of 4 rollouts'", seconds=20)
    assert {row[0] for row in texts(page, ".rows .row")} == {"2"}


def test_sorting_puts_rollouts_without_a_value_last(page):
    credit = "[data-key=credit] button"
    column = ".rows .row > :nth-child(9)"
    page.move(credit, click=True)
    up = texts(page, column)
    page.move(credit, click=True)
    assert (up[0], up[2:]) == (texts(page, column)[1], ["\u2013", "\u2013"])
    assert texts(page, column)[0] == "0.75"


def test_tokens_have_the_colour_of_their_advantage(page):
    first, later, wrong = colour(page, 0, 0), colour(page, 0, 4), colour(page, 1, 0)
    assert first[2] > first[0] + 60  # blue
    assert wrong[0] > wrong[2] + 60  # orange
    assert first[0] < later[0] < 255
    assert colour(page, 1, 9) == [255, 255, 255]  # not sampled
    assert texts(page, ".legend .number") == ["\u22121.5", "1.5"]
    ink = page.run(f"getComputedStyle({TOKEN.format(pane=0, at=0)}).color")
    assert ink == "rgb(255, 255, 255)"


def test_tokens_and_their_parts(page):
    assert "".join(texts(page, ".pane:first-child .token")).replace("\u2b1a", "") == (
        "1+2=3;\u2713<answer>3</answer>"
    )
    assert page.run("document.querySelectorAll('.pane:first-child .part').length") == 3
    assert texts(page, ".border")[:2] == ["attempt 1", "step 10.125"]


def test_the_card_has_all_numbers_of_a_token(page):
    page.press("t")
    page.press("ArrowRight")
    card = page.run("document.getElementById('card').innerText").split()
    assert card[0] == '"+"'
    assert card[card.index("advantage") + 1] == "0.75"
    assert card[card.index("gap") + 1] == "1.000e\u22127"
    assert card[card.index("weight") + 1] == "0.25"
    assert page.run("document.activeElement.dataset.at") == "1"
    page.press("Escape")
    assert page.run("document.getElementById('card').hidden")


def test_keyboard(page):
    assert opened(page) | {"prompt": "sum/0", "sample": "0", "beside": "1"} == opened(page)
    page.press("j")
    page.until("new URLSearchParams(location.hash.slice(1)).get('sample') === '1'")
    page.press("J")
    page.until("new URLSearchParams(location.hash.slice(1)).get('step') === '2'")
    assert opened(page)["prompt"] == ATTACK
    page.press("K")
    page.until("new URLSearchParams(location.hash.slice(1)).get('step') === '1'")
    page.press("c")
    assert opened(page)["colour"] == "logprob"
    page.press("s")
    assert page.run("document.querySelectorAll('.pane').length") == 1
    page.press("/")
    assert page.run("document.activeElement.id") == "search"
    page.press("j")
    assert opened(page)["sample"] == "0"
    page.press("Escape")
    page.press("?")
    assert page.run("document.getElementById('help').open")


def test_hostile_text_stays_text(page):
    page.press("J")
    page.until("new URLSearchParams(location.hash.slice(1)).get('step') === '2'")
    assert "".join(texts(page, ".pane:first-child .token")) == ATTACK
    assert page.run("document.images.length") == 0
    assert texts(page, ".legend .number") == ["0", "\u22120.25"]


def test_a_link_opens_its_rollout(browser, example_page):
    browser.open(example_page, "#step=1&prompt=sum%2F0&sample=1&colour=entropy")
    assert texts(browser, ".pane h3") == ["sample 1"]
    assert browser.run("document.getElementById('colour').value") == "entropy"


def test_dark_and_light(page):
    def brightness() -> int:
        found = page.run("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in found[4:-1].split(","))

    assert brightness() > 700
    page.prefer("dark")
    assert brightness() < 120
    page.move("#theme", click=True)
    assert brightness() > 700
    assert colour(page, 0, 0)[0] < 100


@pytest.mark.parametrize("width", [800, 1440])
def test_nothing_sticks_out(page, width):
    page.resize(width, 900)
    overflow = page.run("document.documentElement.scrollWidth - innerWidth")
    page.resize(1440, 900)
    assert overflow <= 0


def test_runs_with_little_in_them(browser, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    browser.open(write_page(tmp_path))
    assert texts(browser, ".notice") == [
        "The run directory has no rollouts (rollouts/step-*.jsonl)."
    ]
    assert texts(browser, ".empty") == ["This page has no rollouts."]
    assert browser.errors == []


def test_ten_thousand_rows_are_a_few_in_the_document(browser, tmp_path):
    write_large_run(tmp_path, num_rollouts=10_000, num_tokens=2)
    seconds = browser.open(write_page(tmp_path))
    assert texts(browser, "#row-count") == ["10,000 rollouts"]
    assert browser.run("document.querySelectorAll('.rows .row').length") < 40
    browser.run("document.querySelector('.table').scrollTop = 1e9")
    browser.until("document.querySelector('.rows .row:last-child')?.dataset.number === '9999'")
    assert seconds < 20  # about 0.5 s on an idle machine; benchmarks/inspect_page.py measures it
