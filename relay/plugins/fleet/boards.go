package fleet

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"agentctl/manifest"
)

// Boards is what the relay knows about boards without asking them. Its methods may be called from
// any goroutine, with the tenant of the caller's token and no other.
type Boards interface {
	// Lookup finds a board of the tenant by its exact id or else its exact name, in memory.
	Lookup(tenant, ref string) (Board, bool)
	// List returns the boards of the tenant, connected or not, in any order, from memory.
	List(tenant string) []Board
	// Tools returns the tools that a board announced last, connected or not, in the order of
	// manifest.Kinds. The slice is read-only. It reads the disk for a board that is not connected.
	Tools(ctx context.Context, tenant, nodeID string) ([]manifest.Tool, error)
	// Protocol is the version of a connected board's link: v2 or v2.1.
	Protocol(nodeID string) string
	// Frame returns the newest frame of a board's open metric streams, and when it arrived.
	Frame(nodeID string) (frame []byte, at time.Time, ok bool)
}

// Status says whether a board can be called, by what the hub knows of its link.
type Status string

// Statuses of a board.
const (
	Online  Status = "online"
	Suspect Status = "suspect" // connected, but silent for 5 s or more; calls fail at once
	Offline Status = "offline"
)

// Board is a board as the relay knows it. It is a copy: the board may go offline before a call reaches it,
// and the kernel's error then says so. Tags may be shared with other copies and must not be changed.
type Board struct {
	ID             string
	Name           string
	NameSet        bool     // by an operator; if not, the board proposed the name, which is data
	Tags           []string // set by operators, sorted
	Description    string   // set by operators
	Status         Status
	CloneSuspected bool  // two installations use its identity
	LastSeenMS     int64 // Unix ms by the relay's clock; 0: never
}

// Label is what a board is called in errors: the name that an operator gave it, or the start of its
// id. No text of a board is part of it.
func (b *Board) Label() string {
	if b.NameSet && b.Name != "" {
		return b.Name
	}
	return manifest.ShortID(b.ID)
}

// Resolve finds the board of a tenant that ref names: by its exact id, then its exact name, then as
// the only one whose id begins with ref. The error is a *manifest.Error; boards of other tenants
// are answered like boards that do not exist.
// Ids and names are in lower case; the case of ref does not matter. If the ids of several boards begin with
// ref, the error names them: a guess could send a call to the wrong board.
func Resolve(boards Boards, tenant, ref string) (Board, error) {
	ref = strings.ToLower(ref)
	if b, ok := boards.Lookup(tenant, ref); ok {
		return b, nil
	}
	return resolveStart(boards.List(tenant), ref)
}

// resolveStart finds the only board of a list whose id begins with ref.
func resolveStart(all []Board, ref string) (Board, error) {
	var found []Board
	for _, b := range all {
		if ref != "" && strings.HasPrefix(b.ID, ref) {
			found = append(found, b)
		}
	}
	switch len(found) {
	case 1:
		return found[0], nil
	case 0:
		return Board{}, UnknownBoard(all, ref)
	}
	return Board{}, &manifest.Error{Code: manifest.ManifestInvalid, Reason: "ambiguous",
		Message: "several board ids begin with this: " + labels(found) + "; give more characters, or the name"}
}

// labels joins the ids of some boards for a message.
func labels(boards []Board) string {
	slices.SortFunc(boards, func(a, b Board) int { return cmp.Compare(a.ID, b.ID) })
	const maxShown = 3
	var list []string
	for i := range boards[:min(maxShown, len(boards))] {
		list = append(list, boards[i].ID)
	}
	if len(boards) > maxShown {
		list = append(list, "and others")
	}
	return strings.Join(list, ", ")
}

// resolve is Resolve for the boards of this relay.
func (p *Plugin) resolve(tenant, ref string) (Board, error) {
	return Resolve(p.opt.Boards, tenant, ref)
}
