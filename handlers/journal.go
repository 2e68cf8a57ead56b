package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"time"

	"agentctl/journal"
	"agentctl/manifest"
	"agentctl/unixrpc"
)

// defaultLines is how many lines a page of system.journal has by default.
const defaultLines = 50

// helperReserve is the part of pageTime for starting the helper and transferring its answer. The
// helper has the rest for reading.
const helperReserve = 300 * time.Millisecond

// Journal answers system.journal: query through the helper behind a socket. Use NewJournal.
type Journal struct{ socket string }

var _ Handler = (*Journal)(nil)

// NewJournal returns the handler of system.journal.
func NewJournal(socket string) *Journal { return &Journal{socket} }

// HasSocket reports whether there is a Unix socket at path.
func HasSocket(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode()&os.ModeSocket != 0
}

// Capability is query.
func (j *Journal) Capability() manifest.Capability { return manifest.Inspection(manifest.KindJournal) }

// Call answers one page, which the helper makes. The page is validated against the schema, because the
// helper may be of another version during an upgrade.
func (j *Journal) Call(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, Stream, error) {
	r := journal.Request{Limit: defaultLines}
	if err := json.Unmarshal(args, &r); err != nil {
		return nil, nil, err
	}
	if r.ToMS != 0 && r.ToMS <= r.FromMS {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "argument to_ms: not after from_ms")
	}
	timed, cancel := pageContext(ctx)
	defer cancel()
	deadline, _ := timed.Deadline()
	// A duration, since the caller's deadline means nothing in the helper's process.
	r.TimeoutMS = max(time.Until(deadline)-helperReserve, time.Millisecond).Milliseconds()
	page, err := journal.Query(timed, j.socket, &r)
	var refused *journal.Error
	switch {
	case err == nil && manifest.Validate("mcp://schemas/system.journal.query.output@1.0.0", page) != nil:
		return nil, nil, manifest.E(manifest.Internal, "the journal's helper answered something else; on the board try: agentctl version")
	case err == nil:
		return page, nil, nil
	case errors.As(err, &refused) && refused.Code == journal.CodeCursor:
		return nil, nil, manifest.E(manifest.ManifestInvalid, "argument cursor: not of this journal, or its lines are gone")
	case errors.Is(err, unixrpc.ErrNoHelper):
		return nil, nil, manifest.E(manifest.Internal, "the journal's helper cannot be reached; on the board try: systemctl status agentctl-journal.socket")
	case errors.Is(err, unixrpc.ErrNoAnswer):
		return nil, nil, manifest.E(manifest.Internal, "the journal's helper gave no answer; call again, or on the board try: journalctl -u 'agentctl-journal@*'")
	case timed.Err() != nil:
		return nil, nil, manifest.E(manifest.DeadlineExceeded, "the journal's helper did not answer in time")
	}
	return nil, nil, manifest.E(manifest.Internal, "the journal's helper failed; on the board try: journalctl -u 'agentctl-journal@*'")
}
