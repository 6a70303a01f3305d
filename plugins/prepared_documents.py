"""The default data source: folders that `prepare` wrote, and Arrow or Parquet files with their columns."""

import attrs

from engine.builtin import resolve
from engine.data.documents import Documents, open_documents
from engine.hookspecs import hookimpl


@attrs.frozen(kw_only=True)
class Options:
    """None: paths stand in [data]."""


class PreparedDocuments:
    @hookimpl
    def open_data_source(self, path: str, vocab_size: int, mask_token_id: int) -> Documents:
        return open_documents(resolve(path), vocab_size=vocab_size, mask_token_id=mask_token_id)


def make(options: Options) -> PreparedDocuments:
    return PreparedDocuments()
