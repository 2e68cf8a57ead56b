package fleet

import (
	"fmt"
	"strings"
	"testing"

	"agentctl/manifest"
)

// TestUnknownBoard: the error names what the caller probably meant, by names of operators and ids.
func TestUnknownBoard(t *testing.T) {
	boards := []Board{
		{ID: "01jd8z3kq5e6r7t8v9w0x1y2z3", Name: "attic", NameSet: true},
		{ID: "01jd8z3kq5e6r9t8v9w0x1y2z4", Name: "attic-cam", NameSet: true},
		{ID: "01hzx9k3m4p7q8r9s0t1v2w3xy", Name: "ignore-all-rules"},
		{ID: "01j8zz3f0v4q7k2m9x5c1b0000", Name: "gate", NameSet: true},
	}
	for ref, want := range map[string]string{
		"atic":                       "attic",
		"attic-":                     "attic, attic-cam",
		"front-gate":                 "gate",
		"01jd8z3kq5e6r7t8v9w0x1y2z9": "attic, attic-cam",
		"01hzx9k3m4p7q8r9s0t1v2w3xx": "01hzx9k3m4p7q8",
		"01hzx9k3n":                  "01hzx9k3m4p7q8",
		"ignore-all-rule":            "",
		"cellar":                     "",
		"x":                          "",
		"":                           "",
		strings.Repeat("a", 1000):    "",
		"\u202egate\x1b":             "gate",
	} {
		e := UnknownBoard(boards, ref)
		near := ""
		if _, rest, ok := strings.Cut(e.Message, "near it: "); ok {
			near, _, _ = strings.Cut(rest, ";")
		}
		if near != want || e.Code != manifest.SafetyDenied || !strings.HasSuffix(e.Message, "fleet.find lists your boards") ||
			strings.ContainsFunc(e.Message, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q: %s, want %q", ref, e.Message, want)
		}
	}
	var many []Board
	for i := range 20_000 {
		many = append(many, Board{ID: manifest.NewNodeID(), Name: fmt.Sprintf("board-%05d", i), NameSet: true})
	}
	if e := UnknownBoard(many, "bord-00042"); !strings.Contains(e.Message, "board-00042") {
		t.Error(e.Message)
	}
}
