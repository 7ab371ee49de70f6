"""By which codec a session is stored, under which root, and whose blocks it may restore."""

from __future__ import annotations

import dataclasses

from kvsnap.formats.codecs import DEFAULT_CODEC, Codec, get_codec, lossless
from kvsnap.formats.errors import NotFound, Unsupported
from kvsnap.formats.identity import EXACT, Identity, Root, differences, root_of
from kvsnap.formats.layout import Layout
from kvsnap.formats.rowset import check_codec
from kvsnap.formats.session import SessionRecord
from kvsnap.formats.tenant import Tenant
from kvsnap.kvstore.fidelity import lossy_roots
from kvsnap.kvstore.reports import ResumeReport
from kvsnap.kvstore.store import Store


class SessionCodec:
    """`codec` and `root` are those of the blocks that are stored from now on."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        layout: Layout,
        tenant: Tenant | None,
        allow_lossy: bool,
    ) -> None:
        self._store, self._identity, self._layout = store, identity, layout
        self._tenant = tenant
        self.allow_lossy = allow_lossy
        self.exact = root_of(identity, tenant)
        # How far rows shrink tells of them: of one prompt two tenants' sealed blocks would have equal
        # lengths, one by one.
        self.default = get_codec("raw" if store.encrypt else DEFAULT_CODEC)
        self.codec, self.root = self.default, self.exact

    @property
    def weights(self) -> str:
        """Digest of the engine's weights."""
        return self._identity.weights

    def use(self, codec: Codec) -> None:
        """Raises `NotFound` or `Unsupported` where its calibration is not here, or it cannot code
        these rows."""
        codec = self._complete(codec)
        identity = dataclasses.replace(self._identity, fidelity=codec.fidelity)
        self.codec, self.root = codec, root_of(identity, self._tenant)

    def own_of(self, stored: SessionRecord | None, problems: list[str]) -> Codec:
        """That of the stored session, where it is lossy and can still be decoded here."""
        if stored is not None and stored.fidelity != EXACT:
            try:
                codec = get_codec(stored.fidelity)
                if not self.same_weights(stored):
                    if codec.of_one_session:  # these weights compute rows of their own
                        return self.default
                    codec = get_codec(codec.id)  # with this model's calibration, if it needs one
                return self._complete(codec)
            except (NotFound, Unsupported) as error:
                problems.append(error.what)
        return self.default

    @property
    def of_tail(self) -> Codec:
        """A tail is coded with the block that it becomes; until then it stays as the engine has it,
        or its tokens would be quantized twice. So would those of state checkpoints."""
        return lossless(self.codec)

    def same_weights(self, record: SessionRecord) -> bool:
        """Whether a session was saved with the weights that the engine has now."""
        changed = differences(record.identity, self.exact.identity)
        return "weights" not in {field for field, _, _ in changed}

    def roots(self) -> list[Root]:
        """Whose blocks may be restored, the better ones first."""
        if self.codec.lossy:
            return [self.exact, self.root]
        if not self.allow_lossy:
            return [self.exact]
        return [self.exact, *lossy_roots(self._store, self._tenant, self._identity)]

    def has_lossy_only(self, report: ResumeReport) -> bool:
        """Whether a resume found nothing because what is stored is lossy, and that was not
        allowed."""
        fidelity_differs = report.stopped_by.startswith("identity: fidelity is")
        if self.codec.lossy or self.allow_lossy or not fidelity_differs:
            return False
        return bool(lossy_roots(self._store, self._tenant, self._identity))

    def _complete(self, codec: Codec) -> Codec:
        codec = self._store.calibrations.complete(codec, self.weights)
        check_codec(codec, self._layout)
        return codec
