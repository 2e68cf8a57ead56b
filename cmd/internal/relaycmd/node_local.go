package relaycmd

import (
	"context"
	"errors"
	"fmt"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/relay/auth"
	"agentctl/relay/kernel"
)

// localNodes is nodeAdmin on a relay's state directory. A relay that runs there sees the
// changes within a second. It finds the node first, so that the record in the audit log, which is written
// before the change, has its tenant and id.
type localNodes struct {
	store  *auth.Store
	tenant string // "": any
	change stateChanger
}

// node finds a node by its id, its name or a prefix of its id, in any tenant unless one is selected:
// the operator of the machine has no tenant.
func (l *localNodes) node(ctx context.Context, ref string) (auth.Node, error) {
	n, err := l.store.FindNode(ctx, l.tenant, ref)
	switch {
	case errors.Is(err, auth.ErrNoNode):
		err = fmt.Errorf("no node has the id, the name or the id prefix %q; see: agentctl ls", ref)
	case errors.Is(err, auth.ErrAmbiguous):
		err = cli.Errorf(cli.ExitUsage, "%q names more than one node; give more of the id, or the tenant with --tenant", ref)
	}
	return n, err
}

// PatchNode implements nodeAdmin. A value that no node can have is a usage error (exit code 2), as over
// HTTP; a name that another node was given is a failure (1), since the same command can work later.
func (l *localNodes) PatchNode(ctx context.Context, ref string, p client.NodePatch, dryRun bool) (*client.NodeChange, error) {
	n, err := l.node(ctx, ref)
	if err != nil {
		return nil, err
	}
	var c auth.AttributeChange
	err = l.change(kernel.Record{Tenant: n.Tenant, Tool: "nodes.update", NodeID: n.NodeID}, dryRun, func(*kernel.Record) (err error) {
		c, err = l.store.SetNodeAttributes(ctx, n.Tenant, n.NodeID, auth.Attributes{Name: p.Name, AddTags: p.AddTags, RemoveTags: p.RemoveTags, Description: p.Description}, dryRun)
		return err
	})
	switch bad := (*auth.AttributeError)(nil); {
	case errors.As(err, &bad):
		return nil, cli.Errorf(cli.ExitUsage, "%w", err)
	case errors.Is(err, auth.ErrNameTaken):
		return nil, errors.New("another node has this name; give that one another name first, or choose another")
	case err != nil:
		return nil, err
	}
	return &client.NodeChange{NodeID: c.NodeID, Before: client.NodeAttributes(c.Before), After: client.NodeAttributes(c.After),
		Displaced: c.Displaced, DisplacedName: c.DisplacedName}, nil
}

// RevokeNode implements nodeAdmin. The node stays registered: a token that is made later works again.
func (l *localNodes) RevokeNode(ctx context.Context, ref string, dryRun bool) (*client.NodeStopped, error) {
	return l.stop(ctx, ref, "nodes.revoke", dryRun, func(n auth.Node) (int, error) {
		return l.store.Revoke(ctx, auth.RevokeRequest{Node: n.NodeID, DryRun: dryRun})
	})
}

// RemoveNode implements nodeAdmin. The events and the lines of the audit log about the node stay.
func (l *localNodes) RemoveNode(ctx context.Context, ref string, dryRun bool) (*client.NodeStopped, error) {
	return l.stop(ctx, ref, "nodes.remove", dryRun, func(n auth.Node) (int, error) {
		return l.store.RemoveNode(ctx, n.Tenant, n.NodeID, dryRun)
	})
}

// stop calls fn, which ends the tokens of a node, and records it as the tool name.
func (l *localNodes) stop(ctx context.Context, ref, name string, dryRun bool, fn func(auth.Node) (int, error)) (*client.NodeStopped, error) {
	n, err := l.node(ctx, ref)
	if err != nil {
		return nil, err
	}
	tokens := 0
	err = l.change(kernel.Record{Tenant: n.Tenant, Tool: name, NodeID: n.NodeID}, dryRun, func(*kernel.Record) (err error) {
		tokens, err = fn(n)
		return err
	})
	return &client.NodeStopped{NodeID: n.NodeID, Name: n.Name, NameSet: n.NameSet, RevokedTokens: tokens}, err
}
