"""Read images and turn them into model inputs."""
