"""Pictures of reports for the docs, taken by headless Chromium from files on the disk: two widths, light and dark.

    python tests/screenshots/screenshots.py [--runs FOLDER]

Makes the gallery's runs in FOLDER, unless they are there, and writes docs/pictures. A line that a page writes to the console fails the program;
without Chromium it says so and does nothing.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from gallery import PROGRAM, REPORTED, ROOT, RUNS, make_runs
from PIL import Image

PICTURES = ROOT / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGES = {
    **{name: (f"{run}/report.html", "section-0") for name, run in REPORTED.items()},
    "distillation": ("first/distilled/report.html", "section-1"),
    "attempts": ("first/rl/report.html", "shown"),
    "comparison": ("comparison.html", "section-0"),
}
"""File and place of what is shown, by the name of its pictures: without the paths of whoever takes them."""

WIDTHS = {"wide": (1280, 860), "narrow": (500, 900)}
SCHEMES = {"light": 1, "dark": 0}
COLOURS = 128
_GREETING = "document idle at"
"""Bokeh's own line about a page that it has drawn."""

_FRAME = '<body style="margin: 0"><iframe src="{source}" style="width: 100vw; height: 100vh; border: 0; display: block"></iframe>'


def write_reports(folder: Path) -> None:
    """Write the pages that are shown, out of the gallery's runs."""
    for words in [*([run] for run in REPORTED.values()), ["first/run", "first/warm", "--output", "comparison.html"]]:
        subprocess.run([str(PROGRAM), "report", *words], cwd=folder, check=True)


def take(browser: str, page: Path, place: str, size: tuple[int, int], scheme: int, picture: Path) -> list[str]:
    """Write a picture of a page; return what the page wrote to the console."""
    with tempfile.TemporaryDirectory() as profile:
        # a page that is scrolled to a place has no picture: it is shown in a frame that is
        frame = Path(profile) / "frame.html"
        frame.write_text(_FRAME.format(source=f"{page.as_uri()}#{place}"), encoding="utf-8")
        command = [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
            *(f"--user-data-dir={profile}", "--virtual-time-budget=20000", f"--blink-settings=preferredColorScheme={scheme}"),
            *(f"--window-size={size[0]},{size[1]}", f"--screenshot={picture}", frame.as_uri()),
        ]
        told = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stderr
    with Image.open(picture) as image:
        image.convert("RGB").quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(picture, optimize=True)
    return [line for line in told.splitlines() if "CONSOLE" in line and _GREETING not in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=RUNS, help="Folder of the runs that are shown.")
    folder = parser.parse_args().runs.absolute()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print(f"NO PICTURES WERE TAKEN: none of {', '.join(BROWSERS)} is installed", file=sys.stderr)
        return 0
    make_runs(folder)
    write_reports(folder)
    PICTURES.mkdir(exist_ok=True)
    wrong: list[str] = []
    for name, (file, place) in PAGES.items():
        for width, size in WIDTHS.items():
            for scheme, number in SCHEMES.items():
                picture = PICTURES / f"report-{name}-{width}-{scheme}.png"
                lines = take(browser, folder / file, place, size, number, picture)
                print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes, {len(lines)} lines in the console")
                wrong += [f"{name}: {line}" for line in lines]
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
