"""The examples of the documentation run as written, from the root of the repository."""

import doctest

import dtshard


def test_examples_of_the_page_run(fixtures, monkeypatch):
    monkeypatch.chdir(fixtures.parent.parent)
    failed, tried = doctest.testfile(str(fixtures.parent.parent / "docs/reference/python.md"), module_relative=False)
    assert failed == 0 and tried > 15


def test_examples_of_docstrings_run(fixtures, monkeypatch):
    monkeypatch.chdir(fixtures.parent.parent)
    failed, tried = doctest.testmod(dtshard)
    assert failed == 0 and tried > 0
