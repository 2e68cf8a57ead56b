package fleet

import (
	"strings"
	"testing"
)

// A board is named by its id, its name, or a start of its id that no other board has, in this order.
func TestResolve(t *testing.T) {
	const single = "01zz00000000000000000000aa" // begins as no other id does
	f := newFleet(3)
	f.boards[2].Name = nodeID(0)[:24] // a name that looks like the start of an id
	f.boards = append(f.boards, Board{ID: single, Name: "single"})
	f.others["other"] = []Board{{ID: "01zzzzzzzzzzzzzzzzzzzzzzzz", Name: "theirs"}}
	for ref, want := range map[string]string{
		nodeID(1):                    nodeID(1),
		strings.ToUpper(nodeID(1)):   nodeID(1),
		"board-001":                  nodeID(1),
		single[:25]:                  single,
		"01zz":                       single,
		nodeID(0)[:24]:               nodeID(2),
		nodeID(0)[:22]:               "", // ambiguous
		"":                           "",
		"theirs":                     "",
		"01zzzz":                     "",
		"01zzzzzzzzzzzzzzzzzzzzzzzz": "",
	} {
		b, err := Resolve(f, "default", ref)
		if b.ID != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v; want %q", ref, b.ID, err, want)
		}
	}
}

// The error says nothing about boards of other tenants: it is the same for an id that nobody has.
func TestUnknownBoardOfOthers(t *testing.T) {
	theirs, nobodys := UnknownBoard(nil, "01zzzzzzzzzzzzzzzzzzzzzzzz"), UnknownBoard(nil, "01zzzzzzzzzzzzzzzzzzzzzzzy")
	if *theirs != *nobodys {
		t.Errorf("%v for another's board and %v for none", theirs, nobodys)
	}
}
