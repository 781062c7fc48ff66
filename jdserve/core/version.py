"""The version of jdserve, for packages that may not import the top one."""

VERSION = "0.1.0"
