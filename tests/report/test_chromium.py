"""The page in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from sample import comparison

from mimicnorm.report import page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

MEASURE = """<script>
const sizes = [...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect(), line = svg.querySelector("[style*='--c']").getBoundingClientRect();
  return [box.width, box.height, line.width].map(Math.round).join("x");
});
document.body.dataset.sizes = sizes.join(" ");
document.body.dataset.wide = document.documentElement.scrollWidth > window.innerWidth;
document.body.dataset.ink = getComputedStyle(document.querySelector("svg text")).fill;
</script>"""


def opened(path, tmp_path, *flags):
    """The page's document after loading, and what the browser logged."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000", *flags]
    command += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout, done.stderr


@pytest.mark.parametrize("scheme", [0, 1])
def test_no_console_error_and_all_plots_are_visible(tmp_path, scheme):
    path = tmp_path / "report.html"
    path.write_text(page(comparison()).replace("</body>", f"{MEASURE}</body>"))
    document, log = opened(path, tmp_path, f"--blink-settings=preferredColorScheme={scheme}")
    assert "CONSOLE" not in log
    sizes = re.search(r'data-sizes="([^"]*)"', document)[1].split()
    assert len(sizes) == 6
    assert all(min(map(int, size.split("x"))) > 20 for size in sizes)
    assert 'data-wide="false"' in document
    light = [int(v) for v in re.search(r'data-ink="rgb\(([^)]*)\)"', document)[1].split(",")]
    assert (sum(light) > 382) == (scheme == 0)  # light ink on dark paper
