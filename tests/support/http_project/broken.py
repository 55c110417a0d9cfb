"""An app that cannot be imported."""

raise RuntimeError("forgot a password")
