"""The UI as a person uses it: a real browser on the real product."""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows import product
from tests.flows.product import Product

sync_api: Any = pytest.importorskip("playwright.sync_api")

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PICTURES = Path(os.environ.get("PICTURES", "")) if os.environ.get("PICTURES") else None
"""Where screenshots are kept, if anywhere: docs/pictures, when the pages have changed."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no browser (Debian: chromium)"),
]
STILL = """document.addEventListener("DOMContentLoaded", () => {
    const still = document.createElement("style");
    still.textContent = "*, ::before, ::after { animation: none !important }";
    document.head.append(still);
})"""
"""Without a GPU a core is busy as long as something on the page moves, and the runs need it."""

MINUTE = 60_000
BETA = "How strongly the policy is held to the reference: reward = beta (log pi - log pi_ref)."


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    with product.serving(tmp_path_factory.mktemp("ui")) as running:
        yield running


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(MINUTE)
        page.add_init_script(STILL)
        yield page
        browser.close()


def picture(page: Any, name: str) -> None:
    if PICTURES is not None:
        page.wait_for_timeout(1500)  # charts and graphs are drawn after the text
        page.screenshot(path=PICTURES / f"{name}.png")


def open_form(page: Any, served: Product, deployment: str = "sft-then-dpo/tiny") -> None:
    """From the list of deployments to the form of one of them, by clicks alone."""
    flow, _, name = deployment.partition("/")
    page.goto(f"{served.url}/v2/deployments")
    page.get_by_placeholder("Search deployments").fill(name)
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=flow, exact=True))
    row.get_by_role("link", name=name, exact=True).click()
    page.get_by_role("button", name="Run").first.click()
    page.get_by_role("menuitem", name="Custom run").click()
    page.get_by_role("button", name="Submit").wait_for()


def field(page: Any, text: str) -> Any:
    """The first input below a help text."""
    below = "xpath=following::*[self::input or self::textarea][1]"
    return page.get_by_text(text, exact=True).first.locator(below)


def submit(page: Any, served: Product) -> str:
    """Press Submit, again if need be (it is there before it is heeded); the run's id."""
    before = {run["id"] for run in all_runs(served)}
    form = page.url
    for _ in range(4):
        page.wait_for_timeout(2000)
        page.get_by_role("button", name="Submit").click()
        try:
            page.wait_for_url(lambda url: url.partition("?")[0] != form.partition("?")[0],
                              timeout=20_000)  # fmt: skip
            break
        except sync_api.TimeoutError:
            continue
    product.wait_for(lambda: len(all_runs(served)) > len(before), 60)
    (new,) = {run["id"] for run in all_runs(served)} - before
    return new


def all_runs(served: Product) -> list[dict[str, Any]]:
    return product.ask(served.api, "/flow_runs/filter", {})


def open_run(page: Any, served: Product, run: str, tab: str) -> None:
    page.goto(f"{served.url}/v2/runs/flow-run/{run}")
    page.get_by_role("tab", name=tab).click()


def shows(page: Any, served: Product, run: str, state: str, minutes: float) -> None:
    """The run comes to be in the state, and the page says so without a reload."""

    def is_there() -> bool:
        return product.run_of(served.api, run)["state"]["name"] == state

    product.wait_for(is_there, 60 * minutes)
    page.get_by_text(state, exact=True).first.wait_for()


def drawn(page: Any) -> set[str]:
    """What the pictures that can be seen show, by their names."""
    images = page.locator("img[alt]")
    widths = images.evaluate_all("each => each.map(i => [i.alt, i.naturalWidth])")
    return {name for name, width in widths if width > 0}


def menu(page: Any, item: str) -> None:
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name=item).click()
    dialog = page.locator("[role=dialog], [role=alertdialog]")
    dialog.get_by_role("button").filter(has_text=re.compile(f"^{item}")).last.click()


@pytest.fixture(scope="module")
def first(page: Any, served: Product) -> str:
    """A run by Submit with no edits."""
    open_form(page, served)
    sync_api.expect(page.get_by_text("Peak learning rate.").first).to_be_visible(timeout=20_000)
    picture(page, "form")
    sync_api.expect(field(page, "Peak learning rate.")).to_have_value("0.002")
    assert "`plan` says in seconds what would be done" in page.content()
    return submit(page, served)


def test_submit_with_no_edits_works_and_the_report_has_curves(
    page: Any, served: Product, first: str
) -> None:
    preset = product.deployment(served.api, "sft-then-dpo/tiny")["parameters"]["config"]
    assert product.run_of(served.api, first)["parameters"]["config"] == preset
    open_run(page, served, first, "Artifacts")
    page.get_by_text("What the run will do").first.wait_for()
    product.wait_for(lambda: product.steps_done(served.home, "sft") > 100)
    product.wait_for(lambda: len(product.artifacts_of(served.api, first)) > 1)
    open_run(page, served, first, "Artifacts")  # the tab does not grow by itself
    page.get_by_text("run-sft-then-dpo-tiny").first.click()
    page.get_by_role("heading", name="sft", exact=True).wait_for()
    open_run(page, served, first, "Artifacts")
    shows(page, served, first, "Completed", 10)
    picture(page, "run")
    page.get_by_text("run-sft-then-dpo-tiny").first.click()
    page.get_by_role("heading", name="Scores").wait_for()
    curves = {"sft: loss", "dpo: rewards", "dpo: gradient norm", "sft: tokens a second"}
    product.wait_for(lambda: curves <= drawn(page), 20)
    page.get_by_role("heading", name="dpo", exact=True).evaluate("each => each.scrollIntoView()")
    picture(page, "report")


def test_one_changed_value_reuses_what_it_does_not_reach(
    page: Any, served: Product, first: str
) -> None:
    product.until(served.api, first)
    open_form(page, served)
    field(page, BETA).fill("0.2")
    run = submit(page, served)
    open_run(page, served, run, "Task Runs")
    shows(page, served, run, "Completed", 10)
    assert product.run_of(served.api, run)["parameters"]["config"]["dpo"]["config"]["beta"] == 0.2
    right = {"sft": "Reused", "dpo": "Trained"}
    product.until_tasks(served.api, run, lambda tasks: right.items() <= tasks.items())
    assert page.get_by_text("Reused").count() >= 5
    picture(page, "reused")


def test_cancel_leaves_no_process_and_retry_goes_to_the_end(
    page: Any, served: Product, first: str
) -> None:
    product.until(served.api, first)
    open_form(page, served)
    field(page, "Peak learning rate.").fill("0.0021")
    run = submit(page, served)
    before = set((served.home / "store" / "sft").iterdir())
    open_run(page, served, run, "Logs")
    product.wait_for(lambda: new_steps(served, before) > 20)
    menu(page, "Cancel")
    shows(page, served, run, "Cancelled", 1.5)
    assert product.ranks(served.home) == []
    product.wait_for(lambda: message_of(served, run).endswith("0 left"), 60)
    page.get_by_role("tab", name="Details").click()
    picture(page, "cancelled")
    menu(page, "Retry")
    shows(page, served, run, "Completed", 10)
    product.until_tasks(served.api, run, lambda tasks: tasks.get("sft") == "Resumed")


@pytest.mark.parametrize("name", ["evaluate/tiny_evaluate", "convert/tiny_convert"])
def test_flows_that_train_nothing_work_unedited_too(page: Any, served: Product, name: str) -> None:
    preset = product.deployment(served.api, name)["parameters"]["config"]
    open_form(page, served, name)
    run = submit(page, served)
    assert product.run_of(served.api, run)["parameters"]["config"] == preset
    open_run(page, served, run, "Artifacts")
    shows(page, served, run, "Completed", 10)
    text = product.page_of(served.api, run, "The run:")
    assert ("## Scores" if name.startswith("evaluate") else "## Exports") in text


def test_a_person_reads_the_results_and_answers(page: Any, served: Product) -> None:
    words = [*product.SHORT, "name=judged", "gate.approval=true"]
    run = product.submit(served.api, "retrain/tiny", overrides=words)["id"]
    product.until(served.api, run, "Suspended", seconds=400)
    open_run(page, served, run, "Artifacts")
    page.get_by_text("run-retrain-judged").first.click()
    page.get_by_role("heading", name="Scores").wait_for()
    open_run(page, served, run, "Artifacts")
    page.get_by_role("button", name="Open menu").click()
    page.get_by_role("menuitem", name="Resume").click()
    form = page.locator("[role=dialog]").last
    form.get_by_text("judged: the first of its name").wait_for()
    form.get_by_role("button", name="Resume", exact=True).click()
    page.get_by_text("'decision' is a required property").wait_for()
    form.get_by_text("Select", exact=True).click()
    page.get_by_role("option", name="promote").click()
    form.locator("textarea").last.fill("reads well")
    picture(page, "answer")
    form.get_by_role("button", name="Resume", exact=True).click()
    shows(page, served, run, "Promoted", 3)
    assert message_of(served, run).startswith("the first of its name; reads well")


def new_steps(served: Product, before: set[Path]) -> int:
    folders = set((served.home / "store" / "sft").iterdir()) - before
    files = [folder / "metrics.jsonl" for folder in folders]
    return max((len(path.read_text().splitlines()) for path in files if path.exists()), default=0)


def message_of(served: Product, run: str) -> str:
    return product.run_of(served.api, run)["state"]["message"] or ""
