//go:build linux

package relaycmd

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/backup"
	"agentctl/relay/kernel"
	"agentctl/term"
)

// newBackup returns the command backup. The stores are copied through SQLite and the relay keeps
// writing meanwhile, so that a backup needs no maintenance window. Only the path goes to stdout, for
// scripts that copy the directory elsewhere.
//
// It reads at most 16 MiB a second, which leaves the relay a part of the disk. The directory gets its name at
// the end, so that the remains of an interrupted backup cannot be taken for a whole one; the next backup
// deletes them. --keep deletes older backups after that, of the same relay only: several relays can share
// DIR. A damaged state is refused with exit code 1, before --keep could delete the last sound backup.
func newBackup() *cobra.Command {
	o := backup.Options{Version: cli.Version}
	var out cli.Output
	c := &cobra.Command{
		Use:   "backup DIR",
		Short: "Back up a relay's state directory, while the relay runs or not",
		Long: `Back up a relay's state directory into a new directory DIR/agentctl-TIME. The relay may run and
write: the copy is one moment of all its stores. It holds the signing keys, so DIR must be readable
by nobody else; it is made with mode 0700 if it is missing.

In it: relay.json, relay.db, keys/, the relay's own TLS authority, events.db, the audit log, and a
manifest with the hash of each file. Not in it: plugins, the configuration in /etc, and
certificates given with --tls-cert.`,
		Example: `  sudo agentctl relay backup /var/backups/agentctl
  sudo agentctl relay backup /var/backups/agentctl --keep 14 -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if o.Keep < 0 {
				return cli.Errorf(cli.ExitUsage, "--keep %d is below 0", o.Keep)
			}
			o.Dir = args[0]
			r, err := backup.Create(cmd.Context(), o)
			if errors.Is(err, auth.ErrNoState) {
				err = fmt.Errorf("%w; name the relay's with --state-dir", err)
			}
			if err != nil {
				return ExplainState(cmd, err)
			}
			return out.Print(cmd, r, func() error {
				fmt.Fprintln(cmd.OutOrStdout(), r.Path)
				fmt.Fprintf(cmd.ErrOrStderr(), "%d files, %s of relay %s; put it back with: agentctl relay restore %s%s\n",
					len(r.Files), term.Bytes(uint64(r.Bytes)), r.RelayID, cli.ShellQuote(r.Path), cli.StateDirHint(cmd))
				for _, path := range r.Deleted {
					fmt.Fprintln(cmd.ErrOrStderr(), "deleted", path)
				}
				return nil
			})
		},
	}
	cli.AddStateDirFlag(c, &o.StateDir)
	c.Flags().IntVar(&o.Keep, "keep", 0, "delete this relay's oldest backups in DIR beyond `N` (0: delete none)")
	out.AddFlags(c)
	return c
}

// newRestore returns the command restore. It asks in one case only: where a token that was revoked
// after the backup would work again. Everything else that it does can be undone, since the state that
// was there is moved aside.
//
// The command has two forms, which share --state-dir, --yes and -o: BACKUP, and --accept-loss without one.
// Both need the relay stopped, and lock the state directory. If the question is answered with no, or nobody
// can answer it, nothing is changed and the exit code is 1.
func newRestore() *cobra.Command {
	var o backup.RestoreOptions
	var out cli.Output
	var loss string
	c := &cobra.Command{
		Use:   "restore BACKUP",
		Short: "Put a backup in the place of a relay's state, or go on without a store that was lost",
		Long: `Put a backup in the place of a relay's state. The relay must not run. The backup is checked first,
and a damaged one changes nothing. What is in the state directory is moved aside, not deleted.

What was revoked after the backup stays revoked: tokens, removed nodes, dropped keys and used
invites are taken from the state that is there. If that cannot be read, the command asks, because
tokens that were revoked since would work again; --yes answers yes. To make all of them void
afterwards: agentctl keys rotate --drop-old.

--accept-loss is for a relay that does not start because a store is lost and there is no backup.
It prints what is lost: STORE is relay.db, events.db or relay.json.`,
		Example: `  sudo agentctl relay restore /var/backups/agentctl/agentctl-20261122T030000Z
  sudo agentctl relay restore --accept-loss events.db`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case loss != "" && len(args) > 0:
				return cli.Errorf(cli.ExitUsage, "give BACKUP or --accept-loss, not both")
			// --yes has one meaning for both forms, so AcceptUnknown carries it to acceptLoss too.
			case loss != "":
				return acceptLoss(cmd, &out, o.StateDir, loss, o.AcceptUnknown)
			case len(args) == 0:
				return cli.Errorf(cli.ExitUsage, "BACKUP is missing: the directory that 'agentctl relay backup' has printed")
			}
			o.Backup = args[0]
			// The first attempt changes nothing if it returns an UnknownError: the operator decides, and
			// a second attempt goes on without what is not known.
			r, err := backup.Restore(cmd.Context(), o)
			var unknown *backup.UnknownError
			if errors.As(err, &unknown) {
				if err = cli.Confirm(cmd, fmt.Sprintf("%v.\nTokens that were revoked since would work again. Restore all the same?", err)); err != nil {
					return err
				}
				o.AcceptUnknown = true
				r, err = backup.Restore(cmd.Context(), o)
			}
			if err != nil {
				return explainRestore(cmd, err)
			}
			// After the restore, which keeps the audit log that is there, or else copies that of the backup.
			recordLocal(cmd, o.StateDir, kernel.Record{Tool: "relay.restore", Target: filepath.Base(o.Backup)})
			return out.Print(cmd, r, func() error { return printRestored(cmd, r) })
		},
	}
	cli.AddStateDirFlag(c, &o.StateDir)
	c.Flags().BoolVar(&o.AcceptUnknown, "yes", false, "restore, or start over, without asking, also when it is not known what was revoked after the backup")
	c.Flags().BoolVar(&o.OtherRelay, "other-relay", false, "replace the state of another relay")
	c.Flags().StringVar(&loss, "accept-loss", "", "go on without `STORE`: relay.db, events.db or relay.json")
	out.AddFlags(c)
	return c
}

// explainRestore adds the next step to an error of a restore. A damaged backup has none here: its error
// names what is wrong with it, and the operator has to choose another backup.
func explainRestore(cmd *cobra.Command, err error) error {
	switch {
	case errors.Is(err, auth.ErrInUse):
		return cli.Errorf(cli.ExitFailure, "%w; stop the relay first, as with: sudo systemctl stop agentctl-relay", err)
	case errors.As(err, new(*backup.OtherRelayError)):
		return cli.Errorf(cli.ExitFailure, "%w; name that relay's state directory with --state-dir, or replace this one with --other-relay", err)
	case errors.Is(err, backup.ErrSound):
		return cli.Errorf(cli.ExitFailure, "%w; start the relay: agentctl relay%s", err, cli.StateDirHint(cmd))
	}
	return ExplainState(cmd, err)
}

// printRestored prints what a restore kept and lost, and the next step. It is all on stdout: there is no
// value among it that a script would read without -o.
//
// Carried is nil where nothing was carried over: relay.json shows that nothing was revoked since, or it is
// unknown what was, as in an empty directory (Unknown says why).
func printRestored(cmd *cobra.Command, r *backup.Restored) error {
	w := cmd.OutOrStdout()
	fmt.Fprintf(w, "restored relay %s as of %s\n", r.RelayID, time.UnixMilli(r.Created).UTC().Format(time.RFC3339))
	if r.Carried != nil {
		fmt.Fprintf(w, "kept from the state before: %d revocation(s), %d used or revoked invite(s), %d removed node(s), %d dropped key(s)\n",
			r.Carried.Revocations, r.Carried.Invites, len(r.Carried.NodesRemoved), len(r.Carried.KeysDropped))
	}
	if r.Unknown != "" {
		fmt.Fprintf(w, "not known is what was revoked since (%s); to void all tokens made before: agentctl keys rotate --drop-old%s\n", r.Unknown, cli.StateDirHint(cmd))
	}
	if r.LostEvents {
		fmt.Fprintln(w, "lost: events after the backup, and with them what happened to tickets")
	}
	if r.Aside != "" {
		fmt.Fprintf(w, "the state before is in %s; delete it when you do not need it\n", r.Aside)
	}
	_, err := fmt.Fprintln(w, "start the relay: sudo systemctl start agentctl-relay, or agentctl relay"+cli.StateDirHint(cmd))
	return err
}

// acceptLoss starts over without a store. It lists what is lost before it asks: what is left of the
// store is kept, but a relay that has run without it has diverged from it.
//
// The list is made twice, for the question without a lock and by AcceptLoss under it; what is printed in
// the end is the second one. A store that is sound is refused (backup.ErrSound), also with --yes.
func acceptLoss(cmd *cobra.Command, out *cli.Output, dir, store string, yes bool) error {
	if !yes {
		if err := cli.Confirm(cmd, fmt.Sprintf("Start over without %s in %s? What is left of it is moved aside.\nWhat is lost:\n  %s\n", store, dir, strings.Join(backup.LostWith(cmd.Context(), dir, store), "\n  "))); err != nil {
			return err
		}
	}
	l, err := backup.AcceptLoss(cmd.Context(), dir, store, time.Now())
	if err != nil {
		return explainRestore(cmd, err)
	}
	recordLocal(cmd, dir, kernel.Record{Tool: "relay.accept_loss", Target: store})
	return out.Print(cmd, l, func() error {
		w := cmd.OutOrStdout()
		fmt.Fprintf(w, "%s is given up:\n  %s\n", store, strings.Join(l.Lost, "\n  "))
		// Nothing was left of a store that was missing, and an older event log goes on in its place.
		if l.Aside != "" {
			fmt.Fprintf(w, "what was left of it is in %s\n", l.Aside)
		}
		_, err := fmt.Fprintln(w, "start the relay: sudo systemctl start agentctl-relay, or agentctl relay"+cli.StateDirHint(cmd))
		return err
	})
}
