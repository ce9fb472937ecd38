"""Every relative link of the README and of ``docs/`` leads to a file and an anchor that are there."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from docs_sources import linked_in_the_site

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
STATIC = sorted((ROOT / "docs").glob("*.html"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures, but for those on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """What headings can be reached by, as GitHub makes it: repeated ones are numbered."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert not dead


def test_links_and_anchors_are_found() -> None:
    """The test above can fail: it finds what there is."""
    assert len(links(ROOT / "README.md")) >= 15
    assert "a-network-larger-than-memory" in anchors(ROOT / "docs" / "coming-from.md")
    assert "nowhere" not in anchors(ROOT / "docs" / "coming-from.md")


def named() -> set[str]:
    """The pages as links from the index and ``mkdocs.yml`` name them."""
    return {page.relative_to(ROOT / "docs").as_posix() for page in (*DOCS, *STATIC)}


def test_the_index_links_every_page_once() -> None:
    index = ROOT / "docs" / "index.md"
    assert Counter(links(index)) == Counter(named() - {"index.md"})


def test_the_site_has_every_page() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    sections = [next(iter(section.values())) for section in nav]
    listed = [one if isinstance(one, str) else next(iter(one.values())) for section in sections for one in section]
    assert Counter(listed) == Counter(named())


@pytest.mark.parametrize(
    ("page", "text", "site"),
    [
        (
            "python.md",
            "[a](../cvmain.py) [b](../configs) [c](feed.md#the-feed) [d](../CHANGELOG.md) ![e](../cvmain.py)",
            "[a](source/cvmain.py) b [c](feed.md#the-feed) [d](source/CHANGELOG.md.txt) ![e](source/cvmain.py)",
        ),
        (
            "how-to/resume.md",
            "[a](../../cvmain.py) [b](../../configs) [c](../feed.md#the-feed) [d](batches.md) ![e](../img/packets.svg)",
            "[a](../source/cvmain.py) b [c](../feed.md#the-feed) [d](batches.md) ![e](../img/packets.svg)",
        ),
    ],
    ids=["page", "page in a folder"],
)
def test_in_the_site_links_to_files_lead_to_copies_and_those_to_folders_are_text(
    page: str, text: str, site: str
) -> None:
    assert linked_in_the_site(text, page) == site
