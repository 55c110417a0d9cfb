"""The header for bodies that a test writes itself."""

JSON = {"content-type": "application/json"}
