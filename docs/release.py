"""Cut a release: `python docs/release.py 0.4.0` writes the version and the date wherever they are stated.

The changelog's section "Unreleased" becomes the section of the release, and a new one begins. The page of releases
gets a row with the supported versions of the former release: check them. Nothing is committed or tagged.
"""

from __future__ import annotations

import argparse
import datetime
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = Path("transformer_engine/_version.py")
PAGES = (Path("docs/install.md"), Path("docs/from_the_original.md"), Path("docs/releases.md"))
ROW = re.compile(r"^\| (?P<own>[\d.]+) \((?P<date>[\d-]+)\)(?P<supported> \|.+)$", re.M)


def release(root: Path, own: str, date: str) -> None:
    """Write a release into the files of a checkout.

    Args:
        root: Folder of the checkout.
        own: Version of this package, such as "0.4.0".
        date: Date of the release, YYYY-MM-DD.

    Raises:
        ValueError: `own` is not a newer version, or no change is listed under "Unreleased". No file is written.
    """
    former = re.search(r'"(?P<api>[\d.]+)\+py(?P<own>[\d.]+)"', (root / VERSION).read_text(encoding="utf-8"))
    assert former is not None, VERSION
    if not re.fullmatch(r"\d+\.\d+\.\d+", own) or _parts(own) <= _parts(former["own"]):
        raise ValueError(f"{own} is not newer than {former['own']}; give a version such as 1.2.3")
    before, after = f"{former['api']}+py{former['own']}", f"{former['api']}+py{own}"
    written = {
        VERSION: _replaced(root, VERSION, before, after),
        Path("CHANGELOG.md"): _changelog(root, former["own"], own, f"{after} ({date})"),
        Path("CITATION.cff"): re.sub(
            r"^date-released: .+$",
            f"date-released: {date}",
            _replaced(root, Path("CITATION.cff"), before, after),
            flags=re.M,
        ),
        **{page: _replaced(root, page, before, after) for page in PAGES},
    }
    written[PAGES[-1]] = _page_of_releases(written[PAGES[-1]], former["own"], own, date)
    for path, text in written.items():
        (root / path).write_text(text, encoding="utf-8")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _replaced(root: Path, path: Path, before: str, after: str) -> str:
    text = (root / path).read_text(encoding="utf-8")
    assert before in text, f"{path} does not name {before}"
    return text.replace(before, after)


def _changelog(root: Path, former: str, own: str, title: str) -> str:
    introduction, _, rest = (root / "CHANGELOG.md").read_text(encoding="utf-8").partition("## Unreleased\n")
    if "\n- " not in rest.partition("\n## ")[0]:
        raise ValueError("CHANGELOG.md lists no change under Unreleased")
    return f"{introduction.replace(f'`py{former}`', f'`py{own}`')}## Unreleased\n\n## {title}\n{rest}"


def _page_of_releases(text: str, former: str, own: str, date: str) -> str:
    row = ROW.search(text)
    assert row is not None and row["own"] == former, f"the first row is not that of {former}"
    introduction, rest = text[: row.start()], text[row.start() :]
    # The commands and names of files below the table, but not the table's earlier rows.
    head, end, tail = rest.partition("\n\n")
    return f"{introduction}| {own} ({date}){row['supported']}\n{head}{end}{tail.replace(former, own)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="version of this package, such as 0.4.0")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="YYYY-MM-DD (default: today)"
    )
    options = parser.parse_args()
    try:
        release(ROOT, options.version, options.date)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
