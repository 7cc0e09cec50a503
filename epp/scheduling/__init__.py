"""Where it goes: filters, scorers, pickers, profiles, and the decision they leave behind. No I/O."""
