"""Tests in the folders of the package; helpers that several tests share are in support/."""
