"""Tests of gradtools; helpers that several tests share are in support/."""
