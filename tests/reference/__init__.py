"""The float64 oracle: expressions, arguments, rows, and its error bound."""
