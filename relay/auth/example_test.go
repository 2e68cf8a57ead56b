package auth_test

import (
	"context"
	"errors"
	"fmt"
	"os"

	"agentctl/manifest"
	"agentctl/relay/auth"
)

func Example() {
	dir, _ := os.MkdirTemp("", "relay")
	defer os.RemoveAll(dir)
	store, err := auth.Open(auth.Options{StateDir: dir})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer store.Close()

	ctx := context.Background()
	minted, err := store.Mint(ctx, auth.MintRequest{Class: "agent", Tenant: "acme", Subject: "claude"})
	if err != nil {
		fmt.Println(err)
		return
	}
	id, err := store.Verify(minted[0].Token, auth.ClassAgent)
	fmt.Println(id.Tenant, id.Subject, id.Has(manifest.ScopeCallReadOnly), id.Has(manifest.ScopeKernelAdmin), err)

	n, _ := store.Revoke(ctx, auth.RevokeRequest{Subject: "claude"})
	err = store.Active(id)
	fmt.Println(n, errors.Is(err, auth.ErrRevoked), manifest.AsError(err).Code)
	// Output:
	// acme claude true false <nil>
	// 1 true E_SAFETY_DENIED
}
