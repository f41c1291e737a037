"""Cut a release: `python docs/release.py 0.4.0` writes the version and the date wherever they are stated.

`python docs/release.py --development 0.5.0` then begins development towards the next version: the package reports
0.5.0.dev0, and the pages keep the release number.

In the changelog, the section "Unreleased" becomes the release's section, and a new one begins. The releases page gets
a row with the former release's supported versions: check them. Nothing is committed or tagged.
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


def release(root: Path, local: str, date: str) -> None:
    """Write a release into a checkout.

    Args:
        root: Folder of the checkout.
        own: This package's version, such as "0.4.0".
        date: Release date, YYYY-MM-DD.

    Raises:
        ValueError: `own` is not a newer version, or no change is listed under "Unreleased". No file is written.
    """
    former = _latest_release(root)
    _check_newer(local, former)
    current = _current(root)
    api = current.partition("+")[0]
    before, after = f"{api}+py{former}", f"{api}+py{local}"
    written = {
        VERSION: _replace_once(root, VERSION, current, after),
        Path("CHANGELOG.md"): _changelog(root, former, local, f"{after} ({date})"),
        Path("CITATION.cff"): re.sub(
            r"^date-released: .+$",
            f"date-released: {date}",
            _replace_once(root, Path("CITATION.cff"), before, after),
            flags=re.M,
        ),
        **{page: _replace_once(root, page, before, after) for page in PAGES},
    }
    written[PAGES[-1]] = _page_of_releases(written[PAGES[-1]], former, local, date)
    for path, text in written.items():
        (root / path).write_text(text, encoding="utf-8")


def develop(root: Path, local: str) -> None:
    """Write the development version into the package.

    Args:
        root: Folder of the checkout.
        own: Next version, such as "0.5.0".

    Raises:
        ValueError: `own` is not newer than the latest release. No file is written.
    """
    _check_newer(local, _latest_release(root))
    current = _current(root)
    written = _replace_once(root, VERSION, current, f"{current.partition('+')[0]}+py{local}.dev0")
    (root / VERSION).write_text(written, encoding="utf-8")


def _current(root: Path) -> str:
    """Package version, such as "2.20.2+py0.3.0" or "2.20.2+py0.4.0.dev0"."""
    version_match = re.search(
        r'"([\d.]+\+py[\d.]+(?:\.dev0)?)"', (root / VERSION).read_text(encoding="utf-8")
    )
    assert version_match is not None, VERSION
    return version_match[1]


def _latest_release(root: Path) -> str:
    """Latest release number, from the first row on the releases page."""
    row = ROW.search((root / PAGES[-1]).read_text(encoding="utf-8"))
    assert row is not None, PAGES[-1]
    return row["own"]


def _check_newer(local: str, former: str) -> None:
    if not re.fullmatch(r"\d+\.\d+\.\d+", local) or _parts(local) <= _parts(former):
        raise ValueError(f"{local} is not newer than {former}; give a version such as 1.2.3")


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _replace_once(root: Path, path: Path, before: str, after: str) -> str:
    text = (root / path).read_text(encoding="utf-8")
    assert before in text, f"{path} does not name {before}"
    return text.replace(before, after)


def _changelog(root: Path, former: str, local: str, title: str) -> str:
    introduction, _, rest = (
        (root / "CHANGELOG.md").read_text(encoding="utf-8").partition("## Unreleased\n")
    )
    if "\n- " not in rest.partition("\n## ")[0]:
        raise ValueError("CHANGELOG.md lists no change under Unreleased")
    return f"{introduction.replace(f'`py{former}`', f'`py{local}`')}## Unreleased\n\n## {title}\n{rest}"


def _page_of_releases(text: str, former: str, local: str, date: str) -> str:
    row = ROW.search(text)
    assert row is not None and row["own"] == former, f"the first row is not that of {former}"
    introduction, rest = text[: row.start()], text[row.start() :]
    # Commands and file names below the table, but not the table's earlier rows.
    head, end, tail = rest.partition("\n\n")
    return f"{introduction}| {local} ({date}){row['supported']}\n{head}{end}{tail.replace(former, local)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="version of this package, such as 0.4.0")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="YYYY-MM-DD (default: today)"
    )
    parser.add_argument(
        "--development",
        action="store_true",
        help="begin the development of the version instead of releasing it",
    )
    options = parser.parse_args()
    try:
        if options.development:
            develop(ROOT, options.version)
        else:
            release(ROOT, options.version, options.date)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
