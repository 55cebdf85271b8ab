"""The two files that the whole product writes."""

from table import SECTIONS, write_section


def test_both_files_are_written_and_keep_their_other_section(tmp_path):
    paths = {"short": tmp_path / "docs.md", "full": tmp_path / "runs" / "parity.md"}
    cases = {("a", "ring"): (1e-7, 0), ("a", "gather"): (3e-7, 2), ("b", "ring"): (2e-7, 1)}
    for title in reversed(SECTIONS):
        write_section(
            title, f"About {title}.", ("family", "strategy"), ("loss", "tokens"), cases, by=("family",), **paths
        )
    short, full = paths["short"].read_text(), paths["full"].read_text()
    for text in (short, full):
        assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)
        assert all(f"About {title}." in text for title in SECTIONS)
    assert short.count("| a | 2 | 3e-07 | 2 |") == short.count("| b | 1 | 2e-07 | 1 |") == len(SECTIONS)
    assert full.count("| a | ring | 1e-07 | 0 |") == len(SECTIONS)

    write_section(SECTIONS[0], "Again.", ("family",), ("loss",), {("c",): (1e-8,)}, by=("family",), **paths)
    for path in paths.values():
        assert "Again." in path.read_text()
        assert f"About {SECTIONS[0]}." not in path.read_text()
        assert f"About {SECTIONS[1]}." in path.read_text()
