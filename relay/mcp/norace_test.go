//go:build !race

package mcp

// stalledReaderPeers is the number of readers in TestStalledReader, the stalled one included.
const stalledReaderPeers = 50
