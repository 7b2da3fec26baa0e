"""``rose bench scheduler``: what routing costs, beside other routers; what it keeps when engines fail."""
