"""The cellar: metrics and logs. Everybody may go down; it knows nobody."""
