"""From an EndpointPickerConfig to plugins that are ready to run, and again when the file changes."""
