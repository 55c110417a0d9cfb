"""What `holdfast doctor` checks: one small function for each check. None of them changes anything."""
