"""Contains the tests of gradtools; helpers that several tests share are in support/."""
