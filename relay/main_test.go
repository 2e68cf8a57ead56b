package relay

import (
	"testing"

	"agentctl/sqlitefile/sqlitefiletest"
)

func TestMain(m *testing.M) { sqlitefiletest.Main(m) }
