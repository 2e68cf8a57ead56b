//go:build linux

package relaycmd

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"agentctl/relay/auth"
	"agentctl/relay/storage"
)

// What refuses a state directory leads out of it: each message ends with what to type.
func TestExplainState(t *testing.T) {
	t.Parallel()
	cmd := newCheck()
	if err := cmd.Flags().Set("state-dir", "x"); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		err  error
		want []string
	}{
		{&storage.Error{Store: auth.DatabaseFile, Kind: storage.Damaged, Err: errors.New("relay.db is damaged")},
			[]string{"agentctl relay check --state-dir x", "restore BACKUP --state-dir x", "--accept-loss relay.db --state-dir x"}},
		{&auth.StateError{Dir: "x", Store: auth.RelayFile, Problem: auth.StoreForeign}, []string{"nothing is lost", "--accept-loss relay.json --state-dir x"}},
		{&auth.StateError{Dir: "x", Store: auth.DatabaseFile, Problem: auth.StoreOlder}, []string{"restore BACKUP --state-dir x", "--accept-loss relay.db --state-dir x"}},
		{&auth.StateError{Dir: "x", Store: "events.db", Problem: auth.StoreMissing}, []string{"--accept-loss events.db --state-dir x", "--start-degraded --state-dir x"}},
		{&fs.PathError{Op: "stat", Path: "x/events.db", Err: fs.ErrPermission}, []string{"with sudo"}},
	} {
		err := ExplainState(cmd, tt.err)
		if !errors.Is(err, tt.err) {
			t.Errorf("%v is lost: %v", tt.err, err)
		}
		for _, want := range tt.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("got %q, want %q in it", err, want)
			}
		}
	}
}
