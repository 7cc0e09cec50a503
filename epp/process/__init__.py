"""What any long-running process needs: memory settings, files that are followed, a watch over the event loop."""
