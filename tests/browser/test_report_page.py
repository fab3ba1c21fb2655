"""The report of recorded runs in a real browser, as wide as a desk's screen and as a telephone's.

The runs are the tiny model's, eight steps on two CPU ranks, with R3 and its check and without
(``recorded/README.md``).  Where Chromium is missing and cannot be installed, this reads *not run*.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from r3train.cli import main
from r3train.observe.metrics import read_metrics
from tests.browser import chromium
from tests.debian_packages import installed
from tests.unit.evidence_dirs import write_run
from tests.unit.report_runs import with_metrics

pytestmark = [pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(600)]
RECORDED = Path(__file__).parent / "recorded"
WIDTHS = [1280, 390]


@pytest.fixture(scope="module")
def program() -> str:
    found = installed("chromium", "chromium", "fonts-dejavu-core")
    if found is None:
        pytest.skip("not run: no Chromium, and it cannot be installed here (Debian, as root)")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Path]:
    """The page of both runs side by side."""
    output = tmp_path_factory.mktemp("report") / "report.html"
    runs = [str(RECORDED / name) for name in ("with_r3", "without_r3")]
    result = CliRunner().invoke(main, ["report", *runs, "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output


async def seen_at(
    width: int, program: str, page: Path, profile: Path, **asked: str
) -> chromium.Seen:
    async with chromium.browser(program, profile) as devtools:
        seen = await chromium.look(devtools, page, width, **asked)
    assert seen.width == width
    return seen


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_report_fits_the_window_and_asks_for_nothing(width, program, page, tmp_path):
    seen = await seen_at(width, program, page, tmp_path / "profile")
    assert seen.complaints == [] and seen.requests == []
    assert seen.page_width == width and seen.wide == [] and seen.cut == []
    assert seen.smallest_font >= 9, "nobody reads that"
    for words in ("r3train report", "Over the steps", "passed: 8 steps", "Lowest reward, step 7"):
        assert words in seen.text
    (tmp_path / f"report_{width}.png").write_bytes(seen.screenshot)
    shown = struct.unpack(">II", seen.screenshot[16:24])  # PNG: width and height in its header
    assert shown == (width, seen.height) and len(seen.screenshot) > 50_000


@pytest.mark.parametrize("width", WIDTHS)
async def test_what_failed_and_what_cannot_be_drawn_fit_the_window(width, program, tmp_path):
    def wrong(record):
        return replace(record, fingerprint=1) if record.step == 3 else record

    runs = [write_run(tmp_path / name, range(9), change=wrong) for name in ("short", "long_" * 12)]
    with_metrics(runs[1])
    (runs[1] / "config.toml").write_text("replay = 3")
    arguments = ["report", *map(str, runs)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    seen = await seen_at(width, program, runs[0] / "report.html", tmp_path / "profile")
    assert seen.complaints == [] and seen.requests == []
    assert seen.page_width == width and seen.wide == [] and seen.cut == []
    assert seen.smallest_font >= 9
    for words in ("1 step failed: step 3", "layer 1: fingerprint is", "nan at steps 0..3"):
        assert words in seen.text


# the lines of the reward's chart as they are drawn
DRAWN = """[...document.querySelector('[aria-label="Reward"]').data].filter(line => !line.fill)
  .map(({ x, y, opacity }) => [x, y, opacity || 1])"""
# the ends of its x-axis before and after a pointer is drawn over a part of it, and what a hover names
ZOOMED = """(() => {
  const chart = document.querySelector('[aria-label="Reward"]');
  const drag = chart.querySelector('.nsewdrag'), box = drag.getBoundingClientRect();
  const mouse = (to, kind, x) => to.dispatchEvent(new MouseEvent(kind,
    { bubbles: true, view: window, clientX: box.left + x * box.width, clientY: box.top + 20 }));
  Plotly.Fx.hover(chart, { xval: 2 });
  const hover = chart.querySelector('.hoverlayer').textContent;
  const before = [...chart.layout.xaxis.range];
  mouse(drag, 'mousedown', 0.3);
  mouse(document, 'mousemove', 0.7);
  mouse(document, 'mouseup', 0.7);
  return [before, [...chart.layout.xaxis.range], hover];
})()"""


async def test_a_chart_is_drawn_with_means_where_asked(program, page, tmp_path):
    """Pale the numbers, and over them the mean of each step and the two before."""
    records = read_metrics(RECORDED / "with_r3")
    rewards = [record["rollout/reward_mean"] for record in records]
    profile = tmp_path / "profile"
    seen = await seen_at(1280, program, page, profile, fragment="#mean=3", ask=DRAWN)
    (x, y, pale), (_, means, solid), *other = seen.answer
    assert (x, y, pale, solid) == (list(range(8)), rewards, 0.25, 1) and len(other) == 2
    recent = [rewards[max(0, i - 2) : i + 1] for i in range(8)]
    assert means == pytest.approx([sum(r) / len(r) for r in recent])
    assert seen.complaints == []


async def test_a_chart_is_zoomed_by_a_pointer_and_names_what_it_is_over(program, page, tmp_path):
    seen = await seen_at(1280, program, page, tmp_path / "profile", ask=ZOOMED)
    before, after, hover = seen.answer
    assert before[0] < after[0] < after[1] < before[1]
    assert "with_r3" in hover and "without_r3" in hover


@pytest.mark.parametrize(
    "damage, complaint",
    [
        ("<script>console.error('broken')</script>", "broken"),
        ("<script>nowhere()</script>", "nowhere is not defined"),
    ],
)
async def test_a_console_error_is_seen(damage, complaint, program, page, tmp_path):
    seen = await seen_at(390, program, _with(page, damage, tmp_path), tmp_path / "profile")
    assert len(seen.complaints) == 1 and complaint in seen.complaints[0]


@pytest.mark.parametrize("width", WIDTHS)
async def test_what_is_wider_than_the_window_is_seen(width, program, page, tmp_path):
    wide = f"<div id=wide style='width:{width + 1}px'>x</div>"
    async with chromium.browser(program, tmp_path / "profile") as devtools:
        seen = await chromium.look(devtools, _with(page, wide, tmp_path), width)
    # a telephone's window grows with its page, another one scrolls
    assert seen.width != width or seen.page_width > width
    assert seen.width != width or any('id="wide"' in element for element in seen.wide)


async def test_the_page_lets_nothing_of_a_stranger_run_or_be_fetched(program, page, tmp_path):
    damage = (
        "<script>document.body.innerHTML = 'taken'</script><img src='http://127.0.0.1:9/x.png'>"
    )
    other = tmp_path / "other.html"
    other.write_text(page.read_text().replace("</body>", f"{damage}</body>"))
    seen = await seen_at(390, program, other, tmp_path / "profile")
    assert "r3train report" in seen.text and len(seen.complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in seen.complaints)


async def test_what_comes_from_outside_is_seen(program, page, tmp_path):
    damage = "<img src='http://127.0.0.1:9/x.png'><style>@import 'other.css';</style>"
    seen = await seen_at(390, program, _with(page, damage, tmp_path), tmp_path / "profile")
    asked = {address.rsplit("/", 1)[-1] for address in seen.requests}
    assert asked == {"x.png", "other.css"} and seen.complaints


def _with(page: Path, addition: str, directory: Path) -> Path:
    """The same page with something at its end, and without the policy that would stop it."""
    text = re.sub("<meta http-equiv=[^>]*>", "", page.read_text())
    assert text.count("</body>") == 1
    other = directory / "other.html"
    other.write_text(text.replace("</body>", f"{addition}</body>"))
    return other
