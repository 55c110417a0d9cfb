"""The checks of `holdfast doctor`, one function for each. They change nothing."""
