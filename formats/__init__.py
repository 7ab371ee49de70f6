"""Bytes in, records out: identities, names, block and session files, codecs, other tools' layouts.

Nothing here opens a file, reads a clock or touches an engine. The modules are imported by name
(`from kvsnap.formats import names`), so that `kvsnap --help` pays for none of them.
"""
