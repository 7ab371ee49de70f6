"""Every codec of the table passes the suite that third-party codecs run."""

from __future__ import annotations

from kvsnap.formats.codecs import Codec, get_codec
from kvsnap.testing.codec_suite import CodecSuite


class TestRaw(CodecSuite):
    def make(self) -> Codec:
        return get_codec("raw")


class TestZstd(CodecSuite):
    def make(self) -> Codec:
        return get_codec("zstd")


class TestQ4(CodecSuite):
    def make(self) -> Codec:
        return get_codec("q4")


class TestQ8(CodecSuite):
    def make(self) -> Codec:
        return get_codec("q8")
