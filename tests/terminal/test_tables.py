"""Tables as text: alignment, cells of several lines, wrapping, and what Markdown needs."""

import moezoo.terminal.tables as tables


def test_columns_are_aligned_and_titles_end_at_the_rule():
    found = tables.plain(["name\n  axes", "bytes"], [["a\n  b", "1,024"], ["longest name"], ["", "7"]], right={1})
    assert found == [
        "name",
        "  axes        bytes",
        "────────────────────",
        "a             1,024",
        "  b",
        "longest name",
        "                  7",
    ]
    assert tables.plain(["a"], [["b"]], rule=False) == ["a", "b"]
    assert tables.plain(["a", "b"], []) == ["a  b", "─────"]
    assert tables.plain(["a", "b"], [["longer words", "c"]], rule=False, width=10, gap=" ") == [
        "a        b",
        "longer   c",
        "words",
    ]


def test_the_widest_texts_are_wrapped_and_numbers_are_whole():
    rows = [["short", "some words that do not fit", "1,234,567"]]
    assert tables.plain(["a", "b", "c"], rows, right={2}, rule=False, width=30) == [
        "a      b                     c",
        "short  some words    1,234,567",
        "       that do not",
        "       fit",
    ]
    narrow = tables.plain(["a", "b", "c"], rows, right={2}, rule=False, width=10)
    assert [line.split()[0] for line in narrow] == ["a", "short", "words", "that", "not"]
    assert max(map(len, narrow)) == len("short") + 2 + 8 + 2 + len("1,234,567")


def test_a_table_in_markdown():
    assert tables.markdown(["", "a|b"], [["x", "1"], ["longer", ""]], right={1}) == [
        "|        | a\\|b |",
        "| ------ | ---: |",
        "| x      |    1 |",
        "| longer |      |",
    ]


def test_a_text_is_wrapped_beside_its_name():
    long = "n" * 35
    assert tables.pairs([("a", "one two-three four"), (long, "five"), ("b", "")], width=16, indent=2) == [
        "  a  one",
        "     two-three",
        "     four",
        f"  {long}",
        "     five",
        "  b",
    ]
    assert tables.pairs([("a", "x")], width=20, column=8) == ["a       x"]
    assert tables.pairs([("a", "x" * 9)], width=8) == ["a  xxxxx", "   xxxx"]


def test_cells():
    assert [tables.cell(None, ".2f"), tables.cell(1.234, ".2f"), tables.cell(3)] == ["", "1.23", "3"]
    assert [tables.cell(None, hex), tables.cell(10, hex)] == ["", "0xa"]
