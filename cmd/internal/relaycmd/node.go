package relaycmd

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/term"
)

// nodeAdmin changes what a relay knows about its nodes: over HTTP, or in its state directory. ref is a node
// id, a name, or a unique prefix of an id: among the nodes of the caller's tenant over HTTP, and among all
// nodes in the state directory unless --tenant is given.
type nodeAdmin interface {
	PatchNode(ctx context.Context, ref string, p client.NodePatch, dryRun bool) (*client.NodeChange, error)
	RevokeNode(ctx context.Context, ref string, dryRun bool) (*client.NodeStopped, error)
	RemoveNode(ctx context.Context, ref string, dryRun bool) (*client.NodeStopped, error)
}

// Over HTTP the client of a relay is a nodeAdmin as it is; localNodes is the other one.
var _ nodeAdmin = (*client.Client)(nil)

// nodeFlags are the flags that all commands of the group have. Each command prints what it changed and the
// command that undoes it; with --dry-run it prints what would change, from the same answer of the relay,
// which then changes nothing.
type nodeFlags struct {
	adminFlags
	dryRun bool
}

func (f *nodeFlags) addFlags(c *cobra.Command) {
	f.adminFlags.addFlags(c, "any")
	cli.AddDryRunFlag(c, &f.dryRun)
}

// run calls fn with the administration of the relay, or of the state directory, that the flags select.
func (f *nodeFlags) run(cmd *cobra.Command, fn func(nodeAdmin) error) error {
	return f.adminFlags.run(cmd, func(rc *client.Client) error { return fn(rc) },
		func(s *auth.Store) error { return fn(&localNodes{s, f.tenant, f.changer(cmd)}) })
}

// command returns the beginning of a node command for the same relay and node, to print as the undo. It
// repeats the flags that were typed. The node is named by its id: the change may have given the old name to
// another board.
func (f *nodeFlags) command(cmd *cobra.Command, verb, nodeID string) string {
	return "agentctl node " + verb + sameRelay(cmd) + " " + nodeID
}

// did returns done, or planned in a dry run: the words for a change that was made or would be.
func (f *nodeFlags) did(done, planned string) string {
	if f.dryRun {
		return planned
	}
	return done
}

// NewNode returns the command node with its subcommands. What they set is trusted text: it appears in
// descriptions of tools that a model reads, so the relay accepts printable characters only.
func NewNode() *cobra.Command {
	c := &cobra.Command{
		Use:   "node",
		Short: "Name, tag and describe boards; revoke or remove them",
		Long: `Name, tag and describe boards of your tenant, revoke their tokens or remove them. NODE is a
board's id, its name or a unique prefix of its id. On the relay's machine the commands use the state
directory, whether the relay runs or not; elsewhere they call the relay of 'agentctl login', or of
--relay and --token-file, with a token that has the scope nodes:write (agentctl token create --class
tenant-admin).`,
	}
	c.AddCommand(newNodeRename(), newNodeTag("tag"), newNodeTag("untag"), newNodeDescribe(), newNodeStop("revoke"), newNodeStop("remove"))
	return c
}

// newNodeRename returns the command node rename. A name that an operator gives wins over one that a
// board proposes, so that no board can pose as another by its name. A name that an operator gave to another
// board is refused (exit code 1). --unset takes the place of NAME, since an empty NAME is more likely an unset
// variable of a script.
func newNodeRename() *cobra.Command {
	var f nodeFlags
	var unset bool
	c := &cobra.Command{
		Use:   "rename NODE NAME",
		Short: "Give a board a name that it cannot change itself",
		Long: `Give a board a name, unique in its tenant. Until then a board goes by the name that it proposes;
a name that another board only proposed is taken from it. --unset returns to the proposed name.`,
		Example: "  agentctl node rename 01hzx9k3m4p7q8r9s0t1v2w3xy attic\n  agentctl node rename attic --unset",
		Args: func(cmd *cobra.Command, args []string) error {
			if unset {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			name := ""
			if !unset {
				name = args[1]
			}
			return f.patch(cmd, args[0], client.NodePatch{Name: &name}, func(c *client.NodeChange) (did, undo string) {
				// The board that had only proposed the name gets a suffix.
				if c.Displaced != "" {
					fmt.Fprintf(cmd.ErrOrStderr(), "node %s had proposed this name; it %s %s\n", term.SafeLine(c.Displaced), f.did("is now called", "would be called"), term.SafeLine(c.DisplacedName))
				}
				// The first name that an operator gives is undone by --unset: with the proposed name as NAME
				// that one would become the operator's.
				undo = f.command(cmd, "rename", c.NodeID) + " --unset"
				if c.Before.NameSet {
					undo = f.command(cmd, "rename", c.NodeID) + " " + c.Before.Name
				}
				return fmt.Sprintf("node %s %s %s (was %s)", c.NodeID, f.did("is now called", "would be called"), c.After.Name, c.Before.Name), undo
			})
		},
	}
	f.addFlags(c)
	c.Flags().BoolVar(&unset, "unset", false, "return to the name that the board proposes")
	return c
}

// newNodeTag returns the command node tag or node untag, which undo each other. The undo names only the tags
// that the command changed: a tag that the board had before must survive it.
func newNodeTag(verb string) *cobra.Command {
	var f nodeFlags
	short, other := "Add tags to a board", "untag"
	if verb == "untag" {
		short, other = "Take tags from a board", "tag"
	}
	c := &cobra.Command{
		Use:     verb + " NODE TAG...",
		Short:   short,
		Long:    short + ". A tag is 1 to 32 of a-z, 0-9 and -; a board has at most 16.",
		Example: "  agentctl node " + verb + " attic roof north\n  agentctl ls --tag roof",
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			p := client.NodePatch{AddTags: args[1:]}
			if verb == "untag" {
				p = client.NodePatch{RemoveTags: args[1:]}
			}
			return f.patch(cmd, args[0], p, func(c *client.NodeChange) (did, undo string) {
				changed := difference(c.After.Tags, c.Before.Tags)
				if verb == "untag" {
					changed = difference(c.Before.Tags, c.After.Tags)
				}
				now := "no tags"
				if len(c.After.Tags) > 0 {
					now = "the tags " + strings.Join(c.After.Tags, " ")
				}
				return fmt.Sprintf("node %s (%s) %s %s", c.After.Name, c.NodeID, f.did("now has", "would have"), now),
					f.command(cmd, other, c.NodeID) + " " + strings.Join(changed, " ")
			})
		},
	}
	f.addFlags(c)
	return c
}

// difference returns the words of a that b does not have.
func difference(a, b []string) []string {
	return slices.DeleteFunc(slices.Clone(a), func(s string) bool { return slices.Contains(b, s) })
}

// newNodeDescribe returns the command node describe, which sets a description; 'agentctl describe' prints
// one. The undo quotes the text from before for a shell.
func newNodeDescribe() *cobra.Command {
	var f nodeFlags
	c := &cobra.Command{
		Use:   "describe NODE TEXT",
		Short: "Describe a board in a sentence",
		Long: `Describe a board in at most 200 printable characters on one line; an empty TEXT removes the
description. To print what is known about a board: agentctl describe NODE.`,
		Example: "  agentctl node describe attic \"Pi 4 under the ridge, camera and PT100\"\n  agentctl node describe attic \"\"",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.patch(cmd, args[0], client.NodePatch{Description: &args[1]}, func(c *client.NodeChange) (did, undo string) {
				did = fmt.Sprintf("node %s (%s) %s described as %q", c.After.Name, c.NodeID, f.did("is now", "would be"), c.After.Description)
				if c.After.Description == "" {
					did = fmt.Sprintf("node %s (%s) %s no description", c.After.Name, c.NodeID, f.did("now has", "would have"))
				}
				return did, f.command(cmd, "describe", c.NodeID) + " " + cli.ShellQuote(c.Before.Description)
			})
		},
	}
	f.addFlags(c)
	return c
}

// patch changes attributes and prints what changed and how to undo it. The undo has the values from
// before, which the relay returns with its answer: a command that read them first could race.
//
// describe makes both texts of the answer, for a dry run too. A command that changes nothing has exit code 0,
// so that a script can repeat it.
func (f *nodeFlags) patch(cmd *cobra.Command, ref string, p client.NodePatch, describe func(*client.NodeChange) (did, undo string)) error {
	return f.run(cmd, func(admin nodeAdmin) error {
		change, err := admin.PatchNode(cmd.Context(), ref, p, f.dryRun)
		if err != nil {
			return err
		}
		return f.out.Print(cmd, change, func() error {
			did, undo := describe(change)
			b, a := change.Before, change.After
			switch {
			// NameSet counts: a board that is given the name that it proposed keeps it from then on.
			case b.Name == a.Name && b.NameSet == a.NameSet && b.Description == a.Description && slices.Equal(b.Tags, a.Tags):
				did = fmt.Sprintf("nothing to change: node %s (%s) is as asked for already", a.Name, change.NodeID)
			case !f.dryRun:
				did += "; undo with: " + undo
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(did))
			return err
		})
	})
}

// newNodeStop returns the command node revoke or node remove. Both end the board's link; revoke keeps
// what is known about the board, for one that comes back.
//
// Neither can be undone, and neither asks: a script must be able to stop a board at once. The output names
// both ways back, a new invite and a new token. Its number counts tokens that were valid; a key that the
// board joined with is stopped as well, and not counted.
func newNodeStop(verb string) *cobra.Command {
	var f nodeFlags
	c := &cobra.Command{
		Use:   "revoke NODE",
		Short: "Revoke a board's tokens; its link ends within 5 s",
		Long: `Revoke all tokens of a board. Its link ends within 5 s, and it cannot connect until it gets a
new token. Its name, tags and history stay.`,
		Example: "  agentctl node revoke attic\n  agentctl node revoke 01hzx9 --dry-run",
		Args:    cobra.ExactArgs(1),
	}
	if verb == "remove" {
		c.Use, c.Short = "remove NODE", "Forget a board and revoke its tokens"
		c.Long = `Forget a board: its name, tags and description go, its tokens are revoked, and its link ends within
5 s. Its events stay in the event log. This cannot be undone.`
		c.Example = "  agentctl node remove attic\n  agentctl node remove 01hzx9 --dry-run"
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		return f.run(cmd, func(admin nodeAdmin) error {
			stop, done, planned := admin.RevokeNode, "revoked", "would revoke"
			if verb == "remove" {
				stop, done, planned = admin.RemoveNode, "removed the node and revoked", "would remove the node and revoke"
			}
			n, err := stop(cmd.Context(), args[0], f.dryRun)
			if err != nil {
				return err
			}
			return f.out.Print(cmd, n, func() error {
				next := ""
				if !f.dryRun {
					// token create asks a relay that flags name, and no other: not that of a context.
					where, flags := "", sameRelay(cmd)
					if f.isRemote(cmd) && !cmd.Flags().Changed("relay") && !cmd.Flags().Changed("token-file") {
						where, flags = ", on the relay's machine", ""
					}
					next = "; this is not undone: make it join again with a new invite, or create a token" + where + ": agentctl token create --class device --node " + n.NodeID + flags
				}
				line := fmt.Sprintf("%s %d token(s) of %s (%s)%s", f.did(done, planned), n.RevokedTokens, n.Name, n.NodeID, next)
				_, err := fmt.Fprintln(cmd.OutOrStdout(), term.SafeLine(line))
				return err
			})
		})
	}
	f.addFlags(c)
	return c
}
