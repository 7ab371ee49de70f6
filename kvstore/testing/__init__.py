"""Suites and fakes that engines, codecs and remotes of third parties run: the same ones as ours."""
