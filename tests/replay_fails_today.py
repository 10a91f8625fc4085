FAILS_TODAY: dict[str, dict[str, str]] = {}
