package main

import (
	"context"

	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	api "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/jobset/pkg/controllers"
	"sigs.k8s.io/jobset/pkg/webhooks"
)

// Runs the JobSet controller and its webhooks outside the cluster, which $KUBECONFIG names. The folder `certs` has the
// webhooks' certificate. Left out of what jobset's own program does: leader election, metrics, probes, its configuration
// file, and certificates that it makes itself.
func runJobSet(ctx context.Context) error {
	ctrl.SetLogger(klog.Background())
	if err := api.AddToScheme(scheme.Scheme); err != nil {
		return err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  scheme.Scheme,
		Metrics: server.Options{BindAddress: "0"},
		WebhookServer: webhook.NewServer(webhook.Options{
			CertDir: "certs", CertName: "apiserver.crt", KeyName: "apiserver.key",
		}),
	})
	if err != nil {
		return err
	}
	client, events := manager.GetClient(), manager.GetEventRecorderFor("jobset")
	sets, err := webhooks.NewJobSetWebhook(client)
	if err != nil {
		return err
	}
	for _, setup := range []func() error{
		func() error { return controllers.SetupJobSetIndexes(ctx, manager.GetFieldIndexer()) },
		func() error { return controllers.SetupPodIndexes(ctx, manager.GetFieldIndexer()) },
		func() error {
			return controllers.NewJobSetReconciler(client, scheme.Scheme, events).SetupWithManager(manager)
		},
		func() error {
			return controllers.NewPodReconciler(client, scheme.Scheme, events).SetupWithManager(manager)
		},
		func() error { return sets.SetupWebhookWithManager(manager) },
		func() error { return webhooks.NewPodWebhook(client).SetupWebhookWithManager(manager) },
	} {
		if err := setup(); err != nil {
			return err
		}
	}
	return manager.Start(ctx)
}
