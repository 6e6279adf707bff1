"""A program that serves moto's imitation of AWS on a free port of the loopback address until its standard input ends.

It prints `PORT n` when it answers. Where moto's CloudFormation leaves something out, this adds it, by moto's own calls:

* There are placement groups: their names, no more.
* Each auto scaling group tells of two activities: one that succeeded, and one that failed for lack of capacity.
* A subnet's route table is what `describe-route-tables` says, too.
* A stack that was created by a change set has outputs, too.
* Deleting a stack deletes gateways, routes and their tables, too, in an order that their dependencies allow.
* A stack that cannot be created tells so by its events, as AWS documents it: a `CREATE_FAILED` event with the reason
  for the resource, others for those that were cancelled, then a rollback. Moto answers with an error and forgets.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

from moto.autoscaling.responses import AutoScalingResponse
from moto.cloudformation import models, parsing
from moto.core.common_models import CloudFormationModel
from moto.core.responses import ActionResult
from moto.ec2.models import ec2_backends
from moto.ec2.models.internet_gateways import InternetGateway
from moto.ec2.models.route_tables import Route, RouteTable
from moto.ec2.models.subnets import SubnetBackend, SubnetRouteTableAssociation
from moto.ec2.models.vpn_gateway import VPCGatewayAttachment
from moto.ec2.responses import EC2Response
from moto.server import ThreadedMotoServer


class PlacementGroup(CloudFormationModel):
    """A placement group, as far as CloudFormation has to know it."""

    __module__ = "moto.ec2.placement_groups"  # moto knows by it whose model this is

    def __init__(self, name: str) -> None:
        self.physical_resource_id = name

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::PlacementGroup"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name: str, cloudformation_json: Any, account_id: str, region_name: str, **_: Any
    ) -> PlacementGroup:
        groups(ec2_backends[account_id][region_name])[resource_name] = cloudformation_json["Properties"]["Strategy"]
        return cls(resource_name)


def groups(ec2: Any) -> dict[str, str]:
    """Return the strategies of a region's placement groups by their names; they go when the account is emptied."""
    return vars(ec2).setdefault("placement_groups", {})


def create_placement_group(call: Any) -> ActionResult:
    groups(call.ec2_backend)[call._get_param("GroupName")] = call._get_param("Strategy")
    return ActionResult({})


def delete_placement_group(call: Any) -> ActionResult:
    del groups(call.ec2_backend)[call._get_param("GroupName")]
    return ActionResult({})


def describe_placement_groups(call: Any) -> ActionResult:
    found = [{"GroupName": name, "Strategy": strategy} for name, strategy in groups(call.ec2_backend).items()]
    return ActionResult({"PlacementGroups": found})


def describe_scaling_activities(call: Any) -> ActionResult:
    names = call.autoscaling_backend.autoscaling_groups
    outcomes = ({"StatusCode": "Successful"}, {"StatusCode": "Failed", "StatusMessage": "no capacity"})
    return ActionResult(
        {"Activities": [{"AutoScalingGroupName": name, **outcome} for name in names for outcome in outcomes]}
    )


CALLS = (create_placement_group, delete_placement_group, describe_placement_groups)
DELETES: dict[type, Any] = {
    PlacementGroup: lambda ec2, own: groups(ec2).pop(own.physical_resource_id),
    InternetGateway: lambda ec2, own: ec2.delete_internet_gateway(own.id),
    Route: lambda ec2, own: (
        own.route_table.id in ec2.route_tables and ec2.delete_route(own.route_table.id, own.destination_cidr_block)
    ),
    RouteTable: lambda ec2, own: ec2.delete_route_table(own.id),
    SubnetRouteTableAssociation: lambda ec2, own: [
        ec2.disassociate_route_table(name)
        for name, subnet in list(ec2.get_route_table(own.route_table_id)._associations.items())
        if subnet == own.subnet_id
    ],
    VPCGatewayAttachment: lambda ec2, own: [
        ec2.detach_internet_gateway(gateway.id, own.vpc_id)
        for gateway in ec2.internet_gateways.values()
        if gateway.vpc and gateway.vpc.id == own.vpc_id
    ],
}
failures: list[tuple[str, str, str]] = []
create_one = parsing.parse_and_create_resource
associate = SubnetBackend.create_subnet_association
create_all = models.CloudFormationBackend.create_stack
apply_change = models.ChangeSet.apply


def associating(ec2: Any, route_table_id: str, subnet_id: str) -> SubnetRouteTableAssociation:
    ec2.associate_route_table(route_table_id, subnet_id=subnet_id)
    return associate(ec2, route_table_id, subnet_id)


def deleting(call: Any) -> Any:
    def delete(own: Any, account_id: str, region_name: str) -> None:
        call(ec2_backends[account_id][region_name], own)

    return delete


def creating(name: str, resource: dict[str, Any], *rest: Any, **more: Any) -> Any:
    try:
        return create_one(name, resource, *rest, **more)
    except Exception as error:
        failures.append((name, resource["Type"], str(getattr(error, "message", error))))
        raise


def create_stack(cloud: Any, name: str, *rest: Any, **more: Any) -> models.Stack:
    failures.clear()
    try:
        return create_all(cloud, name, *rest, **more)
    except Exception:
        stack: models.Stack | None = next((stack for stack in cloud.stacks.values() if stack.name == name), None)
        if stack is None or not failures:
            raise
        first = failures[0][0]
        told = [failures[0]]
        for name, resource in stack.resource_map._resource_json_map.items():
            if name != first and name not in stack.resource_map._parsed_resources:
                told.append((name, resource["Type"], "Resource creation cancelled"))
        for resource, kind, reason in told:
            words = (stack.stack_id, stack.name, resource, "", kind, "CREATE_FAILED", reason, None)
            stack.events.append(models.Event(*words))
        stack._add_stack_event("ROLLBACK_IN_PROGRESS", f"The following resource(s) failed to create: [{first}].")
        stack._add_stack_event("ROLLBACK_COMPLETE")
        stack.status = "ROLLBACK_COMPLETE"
        stack.output_map = parsing.OutputMap(stack.resource_map, {}, stack.stack_id)
        return stack


def apply(change: models.ChangeSet) -> None:
    apply_change(change)
    change.stack.template_dict = change.template_dict
    change.stack.output_map = change.stack._create_output_map()


def main() -> None:
    warnings.simplefilter("ignore")
    for kind, call in DELETES.items():
        kind.delete = deleting(call)  # type: ignore[attr-defined]
    for call in CALLS:
        setattr(EC2Response, call.__name__, call)
    AutoScalingResponse.describe_scaling_activities = describe_scaling_activities
    SubnetBackend.create_subnet_association = associating  # type: ignore[method-assign]
    parsing.parse_and_create_resource = creating
    models.CloudFormationBackend.create_stack = create_stack  # type: ignore[method-assign]
    models.ChangeSet.apply = apply  # type: ignore[method-assign]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print("PORT", server.get_host_and_port()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
