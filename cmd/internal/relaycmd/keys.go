//go:build linux

package relaycmd

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
	"agentctl/term"
)

// NewKeys returns the command keys with its subcommands. They work on a state directory only: a relay
// has no API for its signing keys.
func NewKeys() *cobra.Command {
	c := &cobra.Command{
		Use:   "keys",
		Short: "List and rotate the keys with which a relay signs tokens",
		Long: `List and rotate the keys in a relay's state directory, whether the relay runs or not. One key
signs; a key that was replaced verifies tokens until the last one that it signed has expired. Which
files in keys/ are keys is recorded in relay.db: a file that somebody puts there is not used.`,
	}
	c.AddCommand(newKeysRotate(), newKeysLs())
	return c
}

// newKeysLs returns the command keys ls. It prints ids and dates, and no part of a key.
func newKeysLs() *cobra.Command {
	var dir string
	var out cli.Output
	c := &cobra.Command{
		Use:   "ls",
		Short: "List the signing keys",
		Long: `List the signing keys, the oldest first. States: signs; verifies, until its last token has expired;
expired; missing, the file was taken away and its tokens do not work; unrecorded, a file that is not
a key of this relay and is not used.`,
		Example: "  agentctl keys ls\n  agentctl keys ls -o json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := openStore(cmd, dir, true)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			keys, err := s.Keys(cmd.Context())
			if err != nil {
				return err
			}
			return cli.PrintList(&out, cmd, keys, func() error { return printKeys(cmd, keys) })
		},
	}
	cli.AddStateDirFlag(c, &dir)
	out.AddFlags(c)
	return c
}

// printKeys prints a table of keys, the oldest first. An unrecorded key has no dates, and the one that signs
// has no end yet. Dates are in UTC.
func printKeys(cmd *cobra.Command, keys []auth.KeyInfo) error {
	date := func(t *time.Time) string {
		if t == nil {
			return "-"
		}
		return t.Format(time.DateOnly)
	}
	table := term.NewTable(cmd.OutOrStdout(), "KEY", "STATE", "CREATED", "VERIFIES UNTIL")
	for _, k := range keys {
		table.Row(k.KID, k.State, date(k.Created), date(k.VerifiesUntil))
	}
	return table.Flush()
}

// newKeysRotate returns the command keys rotate. Only --drop-old ends tokens, and so it is what a
// leaked key needs; a rotation without it is routine and can run from a timer.
//
// At most 16 keys are recorded at a time. A timer that rotates too often for the life of tokens reaches that
// bound: the error is auth.ErrFull, and nothing was rotated. In the audit log the reason drop_old marks a
// rotation that ended tokens.
func newKeysRotate() *cobra.Command {
	var dir string
	var out cli.Output
	var req auth.RotateRequest
	c := &cobra.Command{
		Use:   "rotate",
		Short: "Make a new signing key",
		Long: `Make a new signing key, which a relay that runs uses within 5 s. No token stops working: the old
key verifies until the last token that it signed has expired, and a rotation 30 days after that
deletes its file.

--drop-old is for a key that has leaked. It deletes all older keys at once, so every token that they
signed stops working: boards and agents that have joined get new ones by themselves, and the tokens
that were made with 'agentctl token create' must be made again.`,
		Example: "  agentctl keys rotate\n  agentctl keys rotate --drop-old --dry-run",
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := openStore(cmd, dir, true)
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			var keys []auth.KeyInfo
			err = localChange(cmd, dir, kernel.Record{Tool: "keys.rotate"}, req.DryRun, func(r *kernel.Record) (err error) {
				if req.DropOld {
					r.Reason = "drop_old"
				}
				keys, err = s.RotateKeys(cmd.Context(), req)
				return err
			})
			// The text of ErrFull ends with "or drop the old ones".
			if errors.Is(err, auth.ErrFull) {
				return fmt.Errorf("%w with: agentctl keys rotate --drop-old%s", err, cli.StateDirHint(cmd))
			}
			if err != nil {
				return err
			}
			return cli.PrintList(&out, cmd, keys, func() error { return printRotation(cmd, keys, req) })
		},
	}
	cli.AddStateDirFlag(c, &dir)
	c.Flags().BoolVar(&req.DropOld, "drop-old", false, "delete all older keys at once: the tokens that they signed stop working")
	cli.AddDryRunFlag(c, &req.DryRun)
	out.AddFlags(c)
	return c
}

// printRotation says what a rotation did, or would do. keys are the keys as they are now: in a dry run
// the one that signs is therefore the one that would be replaced. Keys that have expired, or whose files
// are missing, verify nothing and are left out.
func printRotation(cmd *cobra.Command, keys []auth.KeyInfo, req auth.RotateRequest) error {
	var signs, verify []string
	for _, k := range keys {
		switch k.State {
		case auth.KeySigns:
			signs = append(signs, k.KID)
		case auth.KeyVerifies:
			verify = append(verify, k.KID+" until "+k.VerifiesUntil.Format(time.DateOnly))
		}
	}
	current, next := strings.Join(signs, " "), ""
	switch {
	case req.DryRun && req.DropOld:
		next = fmt.Sprintf("would make a new signing key and delete %s and all older keys; every token made so far would stop working", current)
	case req.DryRun:
		next = fmt.Sprintf("would make a new signing key; %s would verify until its last token has expired", current)
	case req.DropOld:
		next = fmt.Sprintf("key %s signs now, and no other key is left; this is not undone: create new tokens with: agentctl token create%s", current, cli.StateDirHint(cmd))
	default:
		next = fmt.Sprintf("key %s signs now; still verifying: %s; a rotation is not undone, and no token has to be replaced", current, strings.Join(verify, ", "))
	}
	_, err := fmt.Fprintln(cmd.OutOrStdout(), next)
	return err
}
